"""Drafters beside each other: counted by the engine, estimated without it, and what costs make of both."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.drafter_costs import tokens_per_second
from deploy.drafter_eval import SUFFIX, Contender, Costs, Reached, counted, evaluate, seconds_of, speed_of
from deploy.drafter_judge import Judge, Requests
from deploy.drafter_plot import draw
from services.config.speculation import eagle_chain
from services.core.types import Prompt
from services.drafter.evaluate import chain_reach_of, reach_by_place
from services.drafter.export import write_drafter_folder
from services.models.eagle import Eagle
from services.models.eagle3 import Eagle3
from services.models.files import read_config
from services.speculation.cost_table import CostTable
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import OFF, draft_strategy
from tests.deploy.drafter_world import make_target, spec_of
from tests.services.models.tiny import random_drafter

torch.set_num_threads(1)

DEPTH = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def judge(target: Path) -> Judge:
    return Judge(str(target))


def prompts(judge: Judge, count: int) -> tuple[Prompt, ...]:
    """Short, so that the drafter is ready at once."""
    texts = [f"{a}+{b}=" for a in range(3, 9) for b in range(2, 7)][:count]
    return tuple(Prompt(t, t, tuple(judge.tokenizer.encode(t)), "0", "sum") for t in texts)


def near_copy(spec) -> dict[str, torch.Tensor]:
    """Accepted now and then: its state is mostly the target's last one."""
    return random_drafter(spec, scale=0.2)


def test_at_temperature_0_the_estimate_is_the_engines_count_round_by_round(judge: Judge) -> None:
    """Up to the end of each response, where an engine drafts past it."""
    spec, requests = judge.spec, Requests(prompts(judge, 6), 1, 40, 1)
    tensors = near_copy(spec)
    plain, _ = judge.generate(OFF, requests, 0.0)
    rollouts, outcomes = judge.generate(draft_strategy(eagle_chain(DEPTH)), requests, 0.0, tensors)
    assert [r.response_ids for r in rollouts] == [r.response_ids for r in plain], "lossless"
    told, place = [], 0
    for rollout in rollouts:  # one at a time: the rounds lie one response behind the other
        left, own = len(rollout.response_ids), []
        while left > 0:
            outcome = outcomes[place]
            if left > DEPTH + 1:
                own.append(outcome.tokens - 1)
            left, place = left - outcome.tokens, place + 1
        told.append(own)
    assert place == len(outcomes) and sum(map(sum, told)) > 5, "nothing was accepted: the test says nothing"
    for rollout, own in zip(rollouts, told, strict=True):
        states = judge.states([rollout], ())
        (places,) = reach_by_place(Eagle(spec), tensors, judge.head, states, DEPTH, 0.0)
        found, at = [], 0
        while at < len(places):
            found.append(round(sum(places[at])))
            at += found[-1] + 1
        assert found[: len(own)] == own
        whole = chain_reach_of(Eagle(spec), tensors, judge.head, states, DEPTH, 0.0)
        assert whole.rounds == len(found) and whole.acceptance_length == pytest.approx(1 + sum(found) / len(found))


def outcome(tried: tuple[int, ...], accepted: tuple[int, ...], running: int, tokens: int, s: float) -> RoundOutcome:
    view = RoundView(running, 100)
    return RoundOutcome(SUFFIX, view, tokens, StageSeconds(0, 0, s, 0), tried, accepted)


def test_counts_are_by_position_and_over_rounds_with_a_draft() -> None:
    rounds = [outcome((2, 1), (1, 1), 4, 6, 0.5), outcome((), (), 4, 4, 0.25), outcome((2,), (2,), 2, 4, 0.25)]
    found = counted(Contender("suffix index"), rounds, 0.6)
    assert found.rates == (3 / 4, 1.0) and found.reach == (3 / 4, 1 / 4)
    assert found.acceptance_length == 2.0 and found.tokens_per_round == 1 + 4 / 10 and found.how == "engine"
    nothing = counted(Contender("suffix index"), [outcome((), (), 4, 4, 0.25)], 0.6)
    assert nothing.rates == () and nothing.acceptance_length == nothing.tokens_per_round == 1.0
    assert tokens_per_second(rounds, 4) == 10 / 0.75 and tokens_per_second(rounds, 3) is None


def test_the_speed_up_is_that_of_the_best_depth_or_of_no_drafts() -> None:
    costs = Costs(CostTable.typical(), "made up", 200.0)
    good = Reached("a", "eagle", 1.0, "engine", (0.9, 0.8, 0.7), (0.9, 0.72, 0.504), 3.124)
    one, many = (speed_of(good, running, costs) for running in (1, 32))
    by_hand = {}
    for depth, tokens in ((1, 1.9), (2, 2.62), (3, 3.124)):
        chain = draft_strategy(eagle_chain(depth))
        by_hand[depth] = tokens * seconds_of(OFF, 1, 1.0, costs) / seconds_of(chain, 1, tokens, costs)
    assert one.speedup == pytest.approx(max(by_hand.values())) and by_hand[one.depth] == pytest.approx(one.speedup)
    assert 1.0 < many.speedup < one.speedup, "a full batch gains less"
    bad = Reached("b", "eagle", 1.0, "engine", (0.01,), (0.01,), 1.01)
    assert (speed_of(bad, 8, costs).depth, speed_of(bad, 8, costs).speedup) == (0, 1.0)
    seldom = Reached("c", "suffix", 1.0, "engine", (0.9,) * 8, (0.5,) * 8, 1.0)
    assert speed_of(seldom, 8, costs).depth == 0, "a look-up that finds nothing gains nothing"


def test_every_kind_is_judged_on_the_same_prompts(judge: Judge) -> None:
    spec = judge.spec
    eagle3 = Eagle3(spec, (0, 1, 2), (0, 5, 7, 9, 11))
    contenders = [
        Contender("suffix index"),
        Contender("one", Eagle(spec), near_copy(spec)),
        Contender("two", eagle3, random_drafter(spec, method=eagle3)),
    ]
    requests = Requests(prompts(judge, 3), 2, 16, 4)
    found, plain = evaluate(judge, contenders, requests, (0.0, 1.0), DEPTH, offline=False)
    assert [(r.drafter, r.temperature, r.how) for r in found] == [
        (c.name, t, "offline" if c.name == "two" else "engine") for t in (0.0, 1.0) for c in contenders
    ]
    assert len(plain) == 3 + 6, "greedy siblings would say the same"
    for one in found:
        assert all(0 <= rate <= 1 for rate in one.rates) and 1 <= one.acceptance_length <= 1 + 8
        assert list(one.reach) == sorted(one.reach, reverse=True)
    alike, _ = evaluate(judge, contenders, requests, (0.0,), DEPTH, offline=True)
    assert [r.how for r in alike] == ["engine", "offline", "offline"]
    counts = {r.drafter: r.acceptance_length for r in found if r.temperature == 0}
    assert alike[1].acceptance_length == pytest.approx(counts["one"], abs=0.25), "but for the ends of responses"


def test_the_command_tells_a_table_json_and_a_picture(target: Path, tmp_path: Path) -> None:
    spec = spec_of(target)
    for name, method in (("one", Eagle(spec)), ("two", Eagle3(spec, (0, 1, 2)))):
        write_drafter_folder(random_drafter(spec, method=method), method, read_config(target), tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(3, 7))
    )
    arguments = [
        "drafter", "eval", str(tmp_path / "one"), str(tmp_path / "two"), "--target", str(target), "--data",
        str(tmp_path / "prompts.jsonl"), "--prompts", "3", "--siblings", "2", "--max-tokens", "12", "--temperatures",
        "0,1", "--depth", "2", "--costs", "h100-7b",
    ]  # fmt: skip
    shown = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "plot.svg")])
    assert shown.exit_code == 0, shown.output
    for word in ("temperature 0", "temperature 1", "no drafts", "suffix index", "one", "two", "x at 32", "offline"):
        assert word in shown.stdout, shown.stdout
    picture = ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert {"one", "two", "suffix index"} <= {node.text for node in picture.iter() if node.text}
    told = CliRunner().invoke(app, [*arguments, "--json", "--no-suffix"])
    record = json.loads(told.stdout)
    assert record["costs"] == "recorded, h100-7b"
    assert record["acceptance_lengths"].keys() == {"one", "two"} and len(record["speeds"]) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--data", "nowhere"], "neither a prompt file nor a configuration"),
        (["--costs", "nobody"], "recorded are"),
        (["--temperatures", "hot"], "give numbers of at least 0"),
        (["--batches", "0"], "give numbers of at least 1"),
        (["--target", "nowhere"], "no model at nowhere"),
    ],
)
def test_a_wrong_question_is_told(target: Path, tmp_path: Path, changed: list[str], message: str) -> None:
    spec = spec_of(target)
    write_drafter_folder(random_drafter(spec), Eagle(spec), read_config(target), tmp_path / "one")
    base = ["drafter", "eval", str(tmp_path / "one"), "--target", str(target), "--prompts", "1", "--max-tokens", "4"]
    result = CliRunner().invoke(app, [*base, "--temperatures", "1", *changed])
    assert result.exit_code == 2 and message in result.output


def test_a_picture_of_nothing_accepted_is_still_one() -> None:
    from deploy.drafter_eval import Evaluation, Speed

    reached = (Reached("<a>", "eagle", 0.0, "offline", (), (), 1.0),)
    speeds = (Speed("<a>", 0.0, 1, 0, 1.0),)
    ElementTree.fromstring(draw(Evaluation(1, 1, reached, speeds, "none & nothing")))
