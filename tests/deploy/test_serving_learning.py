"""A served model that learns from what it serves: real HTTP, a real engine and trainer, no Ray."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.bench_serve import _untrained
from deploy.serving import ServeArguments, config_of_server, weights_of
from deploy.serving_source import ModelSource, read_weights
from deploy.steady_load import scrape, sum_prompt
from services.core.errors import ConfigError
from services.core.types import ServedVersions
from services.rollout.generator import REST_S
from services.weights.learning import NewDrafter
from tests.deploy.serving_app import EAGLE, OFF, SMALL, TEMPLATE, WAIT_S, Served, arguments, served_here, until

pytestmark = pytest.mark.timeout(600)
# An exam of 256 tokens is over after a dozen answers.
QUICK = ("drafter.pack_tokens=64", "drafter.learning_rate=3e-3", "rollout.engine.max_running=8")
PROMPTS = [f"{a}+{b}+{c}=" for a, b, c in ((12, 7, 5), (3, 88, 40), (61, 9, 2), (5, 5, 99))]


def learning(tmp_path: Path, *settings: str, selector: str = EAGLE) -> ServeArguments:
    source = ModelSource(path="pocket", drafter=str(_untrained("pocket", tmp_path / "untrained")))
    settings = (*SMALL, *QUICK, f"speculation.selector={selector}", *settings)
    return ServeArguments(
        source=source, settings=settings, chat_template=TEMPLATE, max_waiting=64, learn_to=str(tmp_path / "out")
    )


def answers(served: Served, count: int, first: int) -> list[Any]:
    client, rng = served.client(), random.Random(first)
    prompts = [sum_prompt(rng) for _ in range(count)]

    def ask(prompt: str) -> Any:
        return client.completions.create(model="pocket", prompt=prompt, max_tokens=100, temperature=1.0, n=2)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, prompts))


def greedy(served: Served) -> list[str]:
    made = served.client().completions.create(model="pocket", prompt=PROMPTS, max_tokens=80, temperature=0)
    return [c.text for c in made.choices]


def at_rest(served: Served) -> bool:
    """The learner said that it has nothing to do."""
    return served.generator._pause_s == REST_S


def test_drafts_get_better_while_it_serves_and_greedy_texts_stay(tmp_path: Path) -> None:
    args = learning(tmp_path)
    with served_here(args) as made:
        before = greedy(made)
        seen, exams = [], 0
        for n in range(40):
            seen += answers(made, 6, n)
            until(lambda before=exams: made.generator.view("").learning.exams > before or at_rest(made), "it learned")
            exams = made.generator.view("").learning.exams
            if made.generator.versions.drafter >= 2 and len({a.system_fingerprint for a in seen}) > 1:
                break  # a version may be served for less than an answer
        versions = made.generator.versions
        assert versions.policy == 0 and versions.drafter is not None and versions.drafter >= 2
        assert greedy(made) == before
        stamps = {a.system_fingerprint for a in seen}
        assert "policy-0-drafter-0" in stamps and len(stamps) > 1
        assert stamps <= {f"policy-0-drafter-{n}" for n in range(versions.drafter + 1)}
        listed = made.client().models.list().data[0].to_dict()["versions"]
        assert listed == f"policy-0-drafter-{made.generator.versions.drafter}"
        told = scrape(made.url)
        assert told["version/drafter"] >= 2 and told["version/policy"] == 0
        assert told["learn_published_total"] >= 2 and told["swaps_total"] == told["learn_published_total"]
        assert told["learn_exams_total"] >= told["learn_published_total"]
        assert told["requests_total/200"] == len(seen) + 3 and told["answers/running"] == 0
        assert told["generated_tokens_total"] > told["accepted_tokens_total"] > 0
        assert 0 < told["learn_held_bytes"] <= 256 * 2**20
    newest = sorted((tmp_path / "out").glob("policy-0-*/drafter-*"), key=lambda p: int(p.name.split("-")[1]))[-1]
    exported = read_weights(ModelSource(path="pocket", drafter=str(newest)), config_of_server(args))
    untrained = weights_of(args, args.source.model_dump())
    assert exported.drafter is not None and untrained.drafter is not None
    assert not torch.equal(exported.drafter["fc.weight"], untrained.drafter["fc.weight"])
    files = {p.name for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert files == {"config.json", "model.safetensors", "README.md"}, "nothing of the answers is stored"


def test_what_was_learned_before_is_served_again_after_a_restart_and_a_swap_begins_anew(tmp_path: Path) -> None:
    args = learning(tmp_path)
    with served_here(args) as made:
        shelf = made.generator._learner._make_shelf(0, weights_of(args, args.source.model_dump()).policy)
        better = read_weights(ModelSource(path="pocket"), config_of_server(args)).drafter
        assert better is not None and shelf.put(NewDrafter(7, better), 0)
        until(lambda: made.generator.versions == ServedVersions(0, 7), "what lies on the shelf is served")
        asyncio.run(made.generator.swap(weights_of(args, args.source.model_dump()), WAIT_S))
        until(lambda: made.generator.versions == ServedVersions(0, 7), "and again after a swap")
        assert made.generator.view("x").learning.adopted == 2


def test_metrics_ask_for_the_token_and_are_no_part_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGTAIL_TOKEN", "a-token-of-this-test")
    with served_here(arguments(OFF, rows=2)) as made:
        assert httpx.get(f"{made.url}/metrics").status_code == 401
        bearer = {"Authorization": "Bearer a-token-of-this-test"}
        told = httpx.get(f"{made.url}/metrics", headers=bearer)
        assert told.status_code == 200 and told.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'longtail_serving_servers{model="pocket"} 1.0' in told.text
        assert "learn" not in told.text.replace("longtail_learn", ""), "a server that does not learn says nothing of it"
        assert "/metrics" not in httpx.get(f"{made.url}/openapi.json", headers=bearer).json()["paths"]


def test_first_tokens_and_refusals_are_counted() -> None:
    with served_here(arguments(OFF, rows=2)) as made:
        client = made.client()
        list(client.completions.create(model="pocket", prompt="1+1=", max_tokens=3, stream=True))
        client.completions.create(model="pocket", prompt="1+1=", max_tokens=3)
        httpx.post(f"{made.url}/v1/completions", json={"model": "other", "prompt": "1+1="})
        httpx.post(f"{made.url}/v1/completions", content=b"x" * 2**21)
        told = scrape(made.url)
    assert told["first_token_seconds_count"] == 1 and told["request_seconds_count"] == 4
    assert {k: v for k, v in told.items() if k.startswith("requests_total/")} == {
        "requests_total/200": 2, "requests_total/404": 1, "requests_total/413": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "selector", "told"),
    [((), OFF, "no strategy has one"), (("drafter.method=eagle3",), EAGLE, "eagle3")],
)
def test_without_a_drafter_that_can_learn_nothing_starts(
    tmp_path: Path, settings: tuple[str, ...], selector: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of_server(learning(tmp_path, *settings, selector=selector))


@pytest.mark.parametrize("options", [["--learn"], ["--out", "somewhere"]])
def test_learning_and_its_folder_go_together(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", "pocket", *options])
    assert result.exit_code == 2 and "--learn and --out DIR go together" in result.stderr


def test_a_folder_that_cannot_be_made_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["serve", "pocket", "--learn", "--out", str(tmp_path / "file/out")])
    assert result.exit_code == 2 and "cannot be put there" in result.stderr
