"""Real runs whose policy and rollout servers take turns: what they learn is what a split run learns, whoever dies."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from deploy.cluster import run_on_ray
from deploy.local import run_local
from deploy.processes import descendants, still_running
from services.config.load import load_config
from services.coordinator.control import Action, ControlRequest
from services.coordinator.coordinator import Coordinator
from services.core.types import ProgressView, RunEvent
from tests.deploy.tiny_run import make_model_folder, tiny_run
from tests.services.coordinator.world import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PRESETS = Path(__file__).resolve().parents[2] / "deploy" / "presets"
STEPS, PROMPTS, GROUP = 3, 6, 4
LONG = 8  # steps: who watches hears of a phase when a later one may have begun, and what it asks for comes later still


# ------------------------------------------------------------------ in one process


@dataclass
class Learned:
    rollouts: list[Any] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    slot_roles: set[str] = field(default_factory=set)


def learned(runs: Path, policy: str, resident: bool = False) -> Learned:
    """Without what the clock decides: a drafter that trains changes which drafts are offered."""
    overrides = (
        "placement.mode=local", f"placement.policy={policy}", f"placement.resident={str(resident).lower()}",
        "drafter.training.when=never", f"run.dir={runs}",
        f"run.steps={STEPS}", "run.compare_prompts=0", f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.group_size={GROUP}", f"rollout.engine.max_running={PROMPTS * GROUP}",
    )  # fmt: skip
    observer, coordinators = Recorder(), list[Coordinator]()
    config = load_config("pocket-tiny", overrides=overrides, presets_dir=PRESETS)
    run_local(config, observer, on_start=coordinators.append)
    groups = [g for step in sorted(observer.groups) for g in observer.groups[step]]
    client: Any = coordinators[0]._services.policy
    return Learned(
        [(r.response_ids, r.rollout_logprobs) for g in groups for r in g.rollouts],
        client._service.instance._trainer.state(),
        {s.role for s in observer.spans if s.slot.startswith("slot")},
    )


def test_weights_and_rollouts_are_bit_for_bit_those_of_a_split_run(tmp_path: Path) -> None:
    split, shared = (learned(tmp_path, policy) for policy in ("split", "colocated"))
    resident = learned(tmp_path, "colocated", resident=True)
    assert resident.rollouts == split.rollouts and "policy" in resident.slot_roles
    assert "policy" in shared.slot_roles and "policy" not in split.slot_roles
    assert len(shared.rollouts) == STEPS * PROMPTS * GROUP
    assert shared.rollouts == split.rollouts
    assert shared.state.keys() == split.state.keys()
    assert all(torch.equal(shared.state[name], split.state[name]) for name in split.state)
    assert any(name.startswith("optimizer/") for name in split.state), "the policy has learned"


# ------------------------------------------------------------------ on Ray, with a team of two


@dataclass
class Killer(Recorder):
    """SIGKILLs a rollout server while the policy has the slots, and once that is noticed pauses the run until there is
    another one: a run that is paused already asks servers for nothing."""

    handles: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    killed: int | None = None

    def learn(self, handles: dict[str, Any]) -> None:
        self.handles = handles
        self.processes = {name: ray.get(h.process_id.remote(), timeout=60) for name, h in handles.items()}

    def progress(self, view: ProgressView) -> None:
        super().progress(view)
        if view.step == 2 and view.phase == "policy" and self.killed is None:
            self.killed = self.processes["rollout-1"]
            os.kill(self.killed, signal.SIGKILL)

    def event(self, event: RunEvent) -> None:
        super().event(event)
        action: dict[str, Action] = {"slot_lost": "pause", "slot_returned": "resume"}
        if event.subject == "rollout-1" and event.kind in action:
            self._ask(action[event.kind])

    def _ask(self, action: Action) -> None:
        ray.get(self.handles["coordinator"].control.remote(ControlRequest(action)), timeout=60)


@pytest.mark.ray
@pytest.mark.parametrize("transport", ["object_store", "collective"])
def test_a_server_killed_in_the_policys_turn_is_replaced_and_nothing_is_left_behind(
    transport: str, tmp_path: Path
) -> None:
    before, killer = descendants(), Killer()
    started: list[Any] = []

    def on_start(handles: dict[str, Any]) -> None:
        killer.learn(handles)
        started.extend(p for p in descendants() if p not in before)

    config = tiny_run(
        make_model_folder(tmp_path),
        tmp_path,
        rollout={"prompts_per_step": PROMPTS, "group_size": GROUP, "sampling": {"max_tokens": 48}},
        placement={"policy": "colocated", "policy_workers": 2, "policy_cpus": 0.25, "cpus_per_slot": 0.4},
        weights={"transport": transport},
        coordinator={"start_timeout_s": 240.0},
        run={"dir": str(tmp_path), "steps": LONG, "eval_prompts": 4, "compare_prompts": 0},
    )
    summary = run_on_ray(config, killer, on_start=on_start)
    assert killer.killed is not None and summary["status"] == "finished"
    told = [e.kind for e in killer.events if e.subject == "rollout-1"]
    assert told == ["slot_lost", "slot_returned"], "and no transfer failed"
    last = [r for g in killer.groups[LONG] for r in g.rollouts]
    assert any(r.server == "rollout-1" for r in last), "it generates again"
    for groups in killer.groups.values():
        ids = [r.rollout_id for g in groups for r in g.rollouts]
        assert len(groups) == PROMPTS and len(set(ids)) == len(ids) == PROMPTS * GROUP
    values = {name: value[0] for name, value in killer.states[-1].items() if "memory_switches" in name}
    assert values["longtail_memory_switches_total|policy|resume"] == LONG
    assert values["longtail_memory_switches_total|policy|release"] == LONG
    assert started and not still_running(started)
