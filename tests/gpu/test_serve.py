"""`longtail serve` with an SGLang engine behind it, asked by the official client: `LONGTAIL_GPU_MODEL=DIR pytest -m gpu
tests/gpu/test_serve.py -s`. Figures go to results/serve.json."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from deploy.inputs import load_inputs
from deploy.serving import ServeArguments, config_of_server, weights_of
from deploy.serving_source import ModelSource
from services.core.types import Prompt, SamplingParams, ServedVersions
from services.models.tokenizer import load_tokenizer
from tests.deploy.serving_app import Served, chunk_texts, served_here, until
from tests.gpu.cases import CASES, case_config
from tests.gpu.reference import Reference, compare_greedy

pytestmark = pytest.mark.timeout(580)

ENGINE = "{type: sglang, max_running: 64, max_len: 1408, mem_fraction: 0.5, kv_tokens: 100000}"
CHAINS = ", ".join(f"{{drafter: eagle, depth: {d}, num_draft_tokens: {d + 1}}}" for d in (3, 5))
SETTINGS = (
    f"rollout.engine={ENGINE}", f"speculation.selector={{type: adaptive, strategies: [{CHAINS}]}}",
    "model.dtype=bfloat16", "data.max_prompt_tokens=384", "rollout.sampling.max_tokens=1024",
    "coordinator.start_timeout_s=400", "placement.gpus_per_slot=1",
)  # fmt: skip
GREEDY_PROMPTS, CROWD, MAX_TOKENS = 16, 200, 256  # as many as one request may ask for
WAIT_S = 300.0


@pytest.fixture(scope="module")
def args(model: Path) -> ServeArguments:
    return ServeArguments(source=ModelSource(path=str(model / "target")), settings=SETTINGS, name="m", max_waiting=400)


@pytest.fixture(scope="module")
def served(args: ServeArguments) -> Iterator[Served]:
    with served_here(args) as found:
        yield found


@pytest.fixture(scope="module")
def figures(args: ServeArguments, save: Callable[[str, dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    yield found
    save("serve", {"engine": config_of_server(args).rollout.engine.model_dump(), "figures": found})
    print("\n" + "\n".join(f"{key:48} {value}" for key, value in found.items()))


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[Prompt]:
    return list(load_inputs(case_config(CASES["off"], model)).heldout)


def ask(served: Served, prompt: Any, **more: Any) -> Any:
    wanted = {"model": "m", "max_tokens": MAX_TOKENS, "temperature": 0.0, **more}
    return served.client().completions.create(prompt=prompt, **wanted)


def test_greedy_text_is_the_native_engine_s_without_drafts(
    served: Served, prompts: list[Prompt], reference: Reference, model: Path, figures: dict[str, Any]
) -> None:
    few, tokenizer = prompts[:GREEDY_PROMPTS], load_tokenizer(str(model / "target"))
    found = ask(served, [p.text for p in few])
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=(reference.eos,))
    wanted = reference.sample([list(p.token_ids) for p in few], sampling, 0)
    # Both as the ids of their text, without the end.
    base = [{"prompt_ids": prompt, "ids": tokenizer.encode(tokenizer.decode(ids))} for prompt, ids, _ in wanted]
    other = [{"ids": tokenizer.encode(choice.text)} for choice in found.choices]
    compared = compare_greedy(reference, base, other)
    figures["greedy, against the native engine"] = {k: v for k, v in compared.items() if k != "margins"}
    assert compared["equal"] + compared["near_ties"] == GREEDY_PROMPTS
    details = found.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < found.usage.completion_tokens
    figures["of the greedy tokens, drafted"] = round(
        details.accepted_prediction_tokens / found.usage.completion_tokens, 3
    )


def test_streams_choices_seeds_logprobs_and_stops(served: Served, prompts: list[Prompt]) -> None:
    text = prompts[0].text
    chunks = list(ask(served, text, stream=True))
    assert len(chunks) > 2 and "".join(chunk_texts(chunks)).startswith(ask(served, text).choices[0].text[:8])
    answer = ask(served, text, n=4, temperature=1.0, logprobs=0, seed=3)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3] and len({c.text for c in answer.choices}) > 1
    assert all(len(c.logprobs.token_logprobs) > 0 and max(c.logprobs.token_logprobs) <= 0 for c in answer.choices)
    inside = ask(served, text).choices[0].text[6:9]
    stopped = ask(served, text, stop=inside).choices[0]
    assert inside not in stopped.text and stopped.finish_reason == "stop"


def test_a_crowd_is_answered_and_a_swap_meanwhile_mixes_nothing(
    served: Served, args: ServeArguments, prompts: list[Prompt], figures: dict[str, Any]
) -> None:
    weights = weights_of(args, args.source.model_dump())
    newer = replace(weights, versions=ServedVersions(7, 7))
    made_by, begun = list[str](), threading.Event()

    def one(number: int) -> int:
        answer = ask(served, prompts[number % len(prompts)].text, temperature=1.0, seed=number)
        made_by.append(answer.system_fingerprint)
        begun.set()
        assert answer.choices[0].finish_reason in ("stop", "length")
        return int(answer.usage.completion_tokens)

    started = time.monotonic()
    with ThreadPoolExecutor(CROWD) as pool:
        asked = [pool.submit(one, number) for number in range(CROWD)]
        assert begun.wait(WAIT_S)
        before_s = time.monotonic()
        asyncio.run(served.generator.swap(newer, WAIT_S))
        figures["a swap under load, s"] = round(time.monotonic() - before_s, 3)
        tokens = [future.result(WAIT_S) for future in asked]
    figures[f"{CROWD} requests at once, tokens/s"] = round(sum(tokens) / (time.monotonic() - started), 1)
    assert set(made_by) <= {"policy-0-drafter-0", "policy-7-drafter-7"} and made_by[-1] == "policy-7-drafter-7"


def test_who_goes_away_frees_the_engine(served: Served, prompts: list[Prompt], figures: dict[str, Any]) -> None:
    seconds = []
    for _ in range(3):
        stream = ask(served, prompts[0].text, stream=True, temperature=1.0, n=8, max_tokens=1000)
        next(iter(stream))
        stream.close()
        left = time.monotonic()
        until(lambda: served.generator.view("m").running == 0, "nothing runs any more")
        seconds.append(time.monotonic() - left)
    figures["free after a client has gone, s"] = round(statistics.median(seconds), 3)


def test_what_does_not_fit_is_refused_by_name(served: Served, prompts: list[Prompt]) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens"):
        ask(served, prompts[0].text * 50)
