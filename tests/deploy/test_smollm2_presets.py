"""SmolLM2 on a GPU: what its warm-up teaches is what its run asks for, and both keep within their limits."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from deploy.cli_shared import PRESETS_DIR
from deploy.warmup_lessons import lessons
from services.config.load import load_config
from services.config.schema import ClusterConfig, ReasoningGymData
from services.core.types import AcceptanceStats, FinishReason, Prompt, Rollout, SamplingParams
from services.data.source import load_prompts
from services.data.tasks import generate_problems
from services.data.traces import chain_sum_trace
from services.drafter.export import write_drafter_folder
from services.models.drafter import Drafter
from services.models.files import read_config
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.models.tokenizer import Tokenizer, load_tokenizer
from services.reward.verifiers import make_verifier
from services.rollout.sglang.build import slot_arguments
from tests.services.models.smollm2 import FOLDER, needs_smollm2


def preset(name: str, *overrides: str) -> ClusterConfig:
    return load_config(name, overrides=overrides, presets_dir=PRESETS_DIR)


WARMUP, RUN = (preset(f"smollm2-sglang{part}", f"model.path={FOLDER}") for part in ("-warmup", ""))


def source_of(config: ClusterConfig) -> ReasoningGymData:
    assert isinstance(config.data.source, ReasoningGymData)
    return config.data.source


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(FOLDER))


def finished(prompt: Prompt, tokenizer: Tokenizer, ids: tuple[int, ...]) -> Rollout:
    return Rollout(
        "g", prompt.id, 0, 0, prompt.token_ids, ids, (-0.5,) * len(ids), tokenizer.decode(ids), FinishReason.STOP,
        SamplingParams(stop_token_ids=tokenizer.eos_token_ids), (0,), (0,), AcceptanceStats(),
    )  # fmt: skip


def test_the_run_asks_what_the_warm_up_taught() -> None:
    taught, asked = source_of(WARMUP), source_of(RUN)
    assert taught.model_copy(update={"size": asked.size}) == asked
    assert WARMUP.data.seed != RUN.data.seed, "the run's problems are new ones"
    for key in ("chat_template", "heldout_fraction", "max_prompt_tokens"):
        assert getattr(WARMUP.data, key) == getattr(RUN.data, key)
    assert WARMUP.rollout.sampling == RUN.rollout.sampling and WARMUP.reward == RUN.reward
    assert WARMUP.rollout.engine.max_len == RUN.rollout.engine.max_len
    assert WARMUP.warmup.start == "model" and WARMUP.model.dtype == RUN.model.dtype == "bfloat16"
    assert WARMUP.warmup_methods == (RUN.drafter.method,) and WARMUP.drafter.unroll == RUN.drafter.unroll


def test_no_problem_comes_twice() -> None:
    assert RUN.run.steps >= 60
    training = source_of(RUN).size * (1 - RUN.data.heldout_fraction)
    assert RUN.run.steps * RUN.rollout.prompts_per_step < 0.95 * training  # the split follows a hash: about so many


@needs_smollm2
def test_the_longest_problems_fit(tokenizer: Tokenizer) -> None:
    source = source_of(RUN)
    assert source.terms is not None
    longest = source.terms.model_copy(update={"min": source.terms.max})
    problems = generate_problems(source.model_copy(update={"terms": longest, "size": 200}), 3)
    rng = Random(0)
    assert max(len(tokenizer.render(p.text, True)) for p in problems) <= RUN.data.max_prompt_tokens
    traces = [len(tokenizer.encode(chain_sum_trace(p.text, rng))) + 1 for p in problems]
    assert sum(traces) / len(traces) > 150 and max(traces) <= RUN.rollout.sampling.max_tokens


@needs_smollm2
def test_a_lesson_is_a_response_that_the_run_scores_as_right(tokenizer: Tokenizer) -> None:
    fewer = source_of(WARMUP).model_copy(update={"size": 400})
    config = WARMUP.model_copy(update={"data": WARMUP.data.model_copy(update={"source": fewer})})
    prompts = load_prompts(config, tokenizer)
    by_ids = {p.token_ids: p for p in (*prompts.train, *prompts.heldout)}
    verify = make_verifier(RUN.reward, {})
    for lesson in lessons(config, prompts, tokenizer).heldout:
        prompt = by_ids[lesson.ids[: lesson.prompt_len]]
        response = lesson.ids[lesson.prompt_len :]
        assert response[-1] in tokenizer.eos_token_ids
        assert verify(prompt, finished(prompt, tokenizer, response)).correct
        # "#19" becomes "#190", "#-14" "#-140": another number
        wrong = finished(prompt, tokenizer, (*response[:-1], *tokenizer.encode("1"), response[-1]))
        assert not verify(prompt, wrong).correct


@needs_smollm2
def test_the_engine_takes_the_model_with_the_drafter_of_its_warm_up(tmp_path: Path) -> None:
    target = read_config(FOLDER)
    method = drafter_method(RUN.drafter, model_spec(target))
    network = Drafter(method)
    network.reset(torch.Generator().manual_seed(0))
    write_drafter_folder(network.tensors(), method, target, tmp_path / "drafter", 0)
    arguments = slot_arguments(preset("smollm2-sglang", f"model.path={FOLDER}", f"drafter.path={tmp_path}/drafter"),
                               RUN.rollout.engine, 0)  # fmt: skip
    assert arguments["speculative_draft_model_path"] == str(tmp_path / "drafter")
    assert target["hidden_size"] // target["num_attention_heads"] == 64  # what the kernels of serving engines have
