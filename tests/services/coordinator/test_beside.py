"""The drafter trains also while the policy does, where that has GPUs of its own: on simulated services, which work at
the same time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from services.config.schema import ClusterConfig
from services.core.types import HiddenStateChunk, SlotSpan
from services.simulator.clients import SimulatedRollout, _parts
from services.simulator.scenario import Scenario
from services.simulator.world import Notes
from tests.services.coordinator.world import tiny_config
from tests.services.simulator.worlds import cluster, observed, scenario

STEPS = 4


@dataclass
class Watched(Notes):
    spans: list[SlotSpan] = field(default_factory=list)

    def span(self, span: SlotSpan) -> None:
        self.spans.append(span)

    def of(self, role: str) -> list[SlotSpan]:
        return [s for s in self.spans if s.role == role]


def config_of(beside: bool | None, slots: int = 1, states: str = "policy", when: str = "always") -> ClusterConfig:
    tree = cluster(slots, steps=STEPS).model_dump()
    tree["drafter"] |= {"states": states, "training": {"when": when, "beside_policy": beside}}
    return ClusterConfig.model_validate(tree)


def take_states(server: SimulatedRollout, step: int, epoch: int) -> Any:
    """Of a server of simulations, which otherwise have them from the policy."""
    version = server._model._policy or 0
    chunk = HiddenStateChunk(version, step, 4, 400, 400 * 8192)
    return _parts(server._leased("take_states", epoch, lambda now: ((chunk, version), 0.05)))


@pytest.fixture(autouse=True)
def servers_have_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedRollout, "take_states", take_states)


def run(config: ClusterConfig, assumed: Scenario | None = None) -> Watched:
    notes = Watched()
    observed(config, assumed or scenario(policy_gpus=1), lambda agenda: notes)
    assert [m.step for m in notes.steps] == list(range(1, STEPS + 1))
    return notes


@pytest.mark.parametrize("states", ["policy", "engine"])
def test_a_single_slot_trains_while_the_policy_does(states: str) -> None:
    """It is never idle while it generates."""
    never, beside = run(config_of(False, states=states)), run(config_of(True, states=states))
    assert not never.of("drafting") and "drafter_published" not in never.events
    assert beside.steps[-1].drafter_version > 0 and all(m.drafter_micro_steps for m in beside.steps[1:])
    policy = beside.of("policy")
    counted, spent = sum(m.drafting_s for m in beside.steps), sum(s.end_s - s.start_s for s in beside.of("drafting"))
    assert spent - STEPS * (scenario().seconds.micro_step + 0.05) <= counted <= spent, "all but last micro-steps"
    for span in beside.of("drafting"):
        assert any(p.start_s <= span.start_s <= p.end_s for p in policy), "only there"
    assert beside.steps[-1].acceptance_length_live_offline > never.steps[-1].acceptance_length_live_offline


@pytest.mark.parametrize("states", ["policy", "engine"])
def test_nobody_waits_for_it_but_for_the_last_micro_step(states: str) -> None:
    """And where another version is served than the first, for the verdict on one more."""
    never, beside = (run(config_of(wanted, slots=3, states=states)) for wanted in (False, True))
    seconds = scenario().seconds
    for without, trained in zip(never.steps, beside.steps, strict=True):
        assert trained.policy_s == pytest.approx(without.policy_s, abs=0.05)
        assert trained.publish_s <= without.publish_s + seconds.micro_step + seconds.estimate + 0.1
    for policy in beside.of("policy")[1:]:
        there = [s for s in beside.of("drafting") if policy.start_s <= s.start_s <= policy.end_s]
        assert {s.slot for s in there} == {"slot 0", "slot 1", "slot 2"}


def test_a_slot_has_one_holder_at_a_time() -> None:
    notes = run(config_of(True, slots=3, states="engine"))
    for slot in ("slot 0", "slot 1", "slot 2"):
        spans = sorted((s for s in notes.spans if s.slot == slot), key=lambda s: s.start_s)
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))


def test_slots_that_rest_rest_there_too() -> None:
    assert not run(config_of(True, when="never")).of("drafting")


@pytest.mark.parametrize("states", ["policy", "engine"])
@pytest.mark.parametrize("seed", range(6))
def test_whoever_dies_the_run_goes_on(seed: int, states: str) -> None:
    calm = run(config_of(True, slots=3, states=states), scenario(policy_gpus=1))
    rough = run(config_of(True, slots=3, states=states), scenario(policy_gpus=1, failures=400.0, seed=seed))
    assert rough.events.get("slot_lost", 0) + rough.events.get("drafter_lost", 0) > 0
    assert [m.num_rollouts for m in rough.steps] == [m.num_rollouts for m in calm.steps]
    assert rough.steps[-1].drafter_micro_steps > 0


@pytest.mark.parametrize(
    ("placement", "wanted", "beside"),
    [
        ({"gpus_per_slot": 1, "policy_gpus": 1}, None, True),
        ({"gpus_per_slot": 1, "policy_gpus": 1}, False, False),
        ({"gpus_per_slot": 0.6, "policy_gpus": 0.4}, None, False),  # perhaps of one and the same
        ({"gpus_per_slot": 0.6, "policy_gpus": 0.4}, True, True),
        ({"gpus_per_slot": 0, "policy_gpus": 0}, None, False),
        ({"gpus_per_slot": 0, "policy_gpus": 0}, True, True),
        ({"gpus_per_slot": 0.6, "policy_gpus": 0.4, "policy": "colocated"}, None, False),
    ],
)
def test_by_itself_where_the_policy_has_gpus_of_its_own(placement: dict, wanted: bool | None, beside: bool) -> None:
    drafter = {"training": {"beside_policy": wanted}}
    assert tiny_config(placement=placement, drafter=drafter).drafts_beside_policy is beside
    nobody = {"training": {"beside_policy": wanted, "when": "never"}}
    assert not tiny_config(placement=placement, drafter=nobody).drafts_beside_policy


def test_a_colocated_policy_has_the_slots_then() -> None:
    with pytest.raises(ValidationError, match="beside_policy: true, but with"):
        tiny_config(placement={"policy": "colocated"}, drafter={"training": {"beside_policy": True}})
