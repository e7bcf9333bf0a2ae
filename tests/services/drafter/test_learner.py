"""Learning from what is served: with a real trainer, on sequences of a small source that can be learned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.drafter import learner as learner_module
from services.drafter.head import TargetHead
from services.drafter.learner import LOOK_S, ROUND_STEPS, OnlineLearner, parts_of
from services.drafter.shelf import Shelf
from services.models.files import read_config
from services.models.hidden import HiddenStates
from services.models.target import EMBED, HEAD
from services.weights.learning import NewDrafter
from tests.services.drafter.conftest import HIDDEN, VOCAB

PASSES = 4.0  # over every token
CONFIG: dict[str, Any] = {"pack_tokens": 64, "learning_rate": 1e-2, "unroll": 2, "buffer_bytes": 2**20}


class Source:
    """A policy that continues every token by the one after it, nearly always: hidden states say which comes next."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(3)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=numbers)
        self.head = TargetHead(self.embed, self.embed, 0)
        self._numbers = numbers

    @property
    def policy(self) -> dict[str, Tensor]:
        return {EMBED: self.embed, HEAD: self.embed}

    def answers(self, count: int, length: int = 20) -> list[HiddenStates]:
        found = []
        for _ in range(count):
            first = int(torch.randint(0, VOCAB, (1,), generator=self._numbers))
            ids = (torch.arange(length) + first) % VOCAB
            noise = 0.1 * torch.randn(length, HIDDEN, generator=self._numbers)
            hidden = self.embed[(ids + 1) % VOCAB] + noise
            found.append(HiddenStates(ids, hidden, torch.arange(length) >= 2, 0))
        return found


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Make = Callable[..., OnlineLearner]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, make_spec, make_method, make_trainer, model_folder, clock: Clock):
    made: list[OnlineLearner] = []
    target_config = read_config(model_folder())

    def learner(policy: str = "policy-0", seed: int = 0, **changes: Any) -> OnlineLearner:
        trainer = make_trainer(**{**CONFIG, **changes})
        shelf = Shelf(tmp_path / "out", make_method(), target_config, policy)
        made.append(OnlineLearner(trainer, lambda version, tensors: shelf, seed, clock, ThreadPoolExecutor(1), PASSES))
        return made[-1]

    yield learner
    for each in made:
        each.close()


@pytest.fixture
def start(make_method, make_drafter) -> NewDrafter:
    return NewDrafter(4, {n: t.detach().clone() for n, t in make_drafter(make_method()).tensors().items()})


def settled(learner: OnlineLearner) -> None:
    """Until files are read and written."""
    if learner._coming is not None:
        learner._coming.exception(timeout=60)


def work(learner: OnlineLearner, most: int = 10_000) -> list[NewDrafter]:
    """Until there is nothing to do; what was found."""
    found = []
    for _ in range(most):
        settled(learner)
        spare = learner.work()
        if spare.found is not None:
            found.append(spare.found)
        if not spare.more:
            return found
    raise AssertionError("it always has more to do")


def serve(learner: OnlineLearner, source: Source, rounds: int, most: int = 8) -> list[NewDrafter]:
    found = []
    for _ in range(rounds):
        learner.add(source.answers(most))
        found += work(learner)
    return found


def length_of(learner: OnlineLearner, drafter: NewDrafter, states: list[HiddenStates]) -> float:
    return learner._trainer.estimate("", dict(drafter.tensors), states).acceptance_length


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """What `best` keeps for the tests that need a good drafter and do not care how it came about."""
    return {}


@pytest.fixture
def best(trained: dict[str, Any], make: Make, start) -> NewDrafter:
    if not trained:
        source, learner = Source(), make("best")
        learner.begin(0, source.policy, start)
        trained["best"] = serve(learner, source, 14)[-1]
    return trained["best"]


def test_better_drafters_get_the_next_versions_and_are_better_on_answers_to_come(
    make: Make, start, tmp_path, trained: dict[str, Any]
) -> None:
    source, learner = Source(), make()
    learner.begin(0, source.policy, start)
    found = serve(learner, source, 14)
    assert [d.version for d in found] == list(range(5, 5 + len(found))) and len(found) >= 2
    new = source.answers(40)
    lengths = [length_of(learner, d, new) for d in (start, found[0], found[-1])]
    assert lengths[0] < lengths[1] < lengths[2], lengths
    view = learner.view()
    assert view.published == len(found) and view.adopted == 0 and view.exams >= view.published
    assert view.micro_steps > ROUND_STEPS and 0 < view.held_bytes <= CONFIG["buffer_bytes"]
    newest = max((tmp_path / "out/policy-0").iterdir(), key=lambda p: int(p.name.removeprefix("drafter-")))
    assert newest.name == f"drafter-{found[-1].version}"
    trained["best"] = found[-1]  # `best` need not train another one


def test_one_call_makes_one_micro_step_at_most(make: Make, start) -> None:
    source, learner = Source(), make()
    learner.begin(0, source.policy, start)
    learner.add(source.answers(30))
    for _ in range(60):
        before = learner.view()
        settled(learner)
        learner.work()
        after = learner.view()
        steps, exams = after.micro_steps - before.micro_steps, after.exams - before.exams
        assert steps + exams <= 1


def test_without_anything_new_it_comes_to_rest(make: Make, start) -> None:
    source, learner = Source(), make()
    learner.begin(0, source.policy, start)
    assert not learner.work().more, "nothing was served yet"
    learner.add(source.answers(30))
    work(learner)
    learned = learner.view().trained_tokens
    given = 30 * 20
    assert 0 < learned <= PASSES * given + CONFIG["pack_tokens"] * 2
    work(learner)
    assert learner.view().trained_tokens == learned


def test_training_that_brings_nothing_asks_less_often(make: Make, start) -> None:
    """A learning rate of next to nothing: every exam stays open."""
    source = Source()
    seen = []
    for patience in (1, 1000):
        learner = make(f"policy-{patience}", learning_rate=1e-12, training={"patience": patience, "probe_every": 16})
        learner.begin(0, source.policy, start)
        assert serve(learner, source, 6) == []
        seen.append(learner.view().trained_tokens)
    assert seen[0] < seen[1] / 1.5


def test_what_gets_worse_begins_again_from_what_is_served(make: Make, best) -> None:
    source, learner = Source(), make(learning_rate=0.5, grad_clip=100.0)
    learner.begin(0, source.policy, best)
    learner.add(source.answers(30))
    seen = []
    for _ in range(100):
        settled(learner)
        exams = learner.view().exams
        if not learner.work().more:
            break
        if learner.view().exams > exams:
            seen.append((learner.view().gain, length_of(learner, now(learner), source.answers(10))))
    served = length_of(learner, best, source.answers(40))
    worse = [length for gain, length in seen if gain < -0.05]
    assert worse, seen
    assert all(abs(length / served - 1) < 0.2 for length in worse), "the trainer holds the served one again"


def now(learner: OnlineLearner) -> NewDrafter:
    return NewDrafter(-1, learner._trainer.state()["tensors"])


def test_two_servers_never_make_two_drafters_of_one_version(make: Make, start, clock: Clock) -> None:
    source, learners = Source(), [make(seed=n) for n in range(2)]
    for learner in learners:
        learner.begin(0, source.policy, start)
    by_version: dict[int, list[dict[str, Tensor]]] = {}
    for _ in range(10):
        for learner in learners:
            learner.add(source.answers(8))
        going = [True, True]
        for _ in range(400):  # in turns, so that both have candidates at the same time
            going = [self_more(learner, by_version) for learner in learners]
            if not any(going):
                break
        clock.now += LOOK_S
        for learner in learners:
            work(learner)
    assert len(by_version) >= 2
    for version, seen in by_version.items():
        for one, other in itertools.pairwise(seen):
            assert all(torch.equal(one[n], other[n]) for n in one), f"version {version} is two drafters"
    views = [learner.view() for learner in learners]
    assert all(v.adopted for v in views) or sum(v.published for v in views) == max(by_version) - start.version
    clock.now += LOOK_S
    for learner in learners:
        learner.work()
        settled(learner)
        work(learner)
    assert learners[0]._served.version == learners[1]._served.version, "both serve the newest"


def self_more(learner: OnlineLearner, by_version: dict[int, list[dict[str, Tensor]]]) -> bool:
    settled(learner)
    spare = learner.work()
    if spare.found is not None:
        by_version.setdefault(spare.found.version, []).append(dict(spare.found.tensors))
    return spare.more


def test_a_new_server_takes_over_what_others_found_before(
    make: Make, start, best: NewDrafter, clock: Clock, make_method, model_folder, tmp_path
) -> None:
    source, newest, second = Source(), best, make()
    Shelf(tmp_path / "out", make_method(), read_config(model_folder()), "policy-0").put(newest, 0)
    second.begin(0, source.policy, start)
    clock.now += LOOK_S
    (found,) = work(second) or work(second)
    assert found.version == newest.version and second.view().adopted == 1
    assert all(torch.equal(found.tensors[n], t) for n, t in newest.tensors.items())
    assert torch.equal(now(second).tensors["fc.weight"], newest.tensors["fc.weight"]), "and learns on from there"


def test_a_damaged_version_is_told_once_and_what_is_served_stays(
    make: Make, start, clock, tmp_path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(learner_module.LOG, "disabled", False)  # libraries that configure logging disable what is there
    source, learner = Source(), make()
    learner.begin(0, source.policy, start)
    broken = tmp_path / "out/policy-0/drafter-9"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    for _ in range(3):
        clock.now += LOOK_S
        assert work(learner) == []
        settled(learner)
        assert work(learner) == []
    assert len([r for r in caplog.records if "what is served stays" in r.message]) == 1


def test_another_policy_begins_anew(make: Make, start) -> None:
    source, learner = Source(), make()
    learner.begin(0, source.policy, start)
    learner.add(source.answers(30))
    for _ in range(5):
        learner.work()
    other = NewDrafter(11, {n: t + 1 for n, t in start.tensors.items()})
    learner.begin(1, {n: 2 * t for n, t in source.policy.items()}, other)
    assert learner.view().held_bytes == learner.view().held_sequences == 0
    assert torch.equal(now(learner).tensors["fc.weight"], other.tensors["fc.weight"])
    assert learner._trainer.head.policy_version == 1 and learner._trainer.updates == 0
    assert not learner.work().more


def test_parts_hold_what_they_may_and_nothing_is_lost() -> None:
    source = Source()
    states = [s for n in (5, 40, 3, 3, 3, 30, 10) for s in source.answers(1, n)]
    parts = parts_of(states, 32)
    assert [s for part in parts for s in part] == states
    assert all(sum(len(s.input_ids) for s in part) <= 32 or len(part) == 1 for part in parts)
    assert parts_of([], 32) == []
