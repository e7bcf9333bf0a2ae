"""A real run on Ray actors in which a rollout server, a drafter trainer and the coordinator are killed mid-step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy.cluster import run_on_ray
from deploy.processes import descendants, still_running
from services.core.types import ProgressView
from tests.deploy.tiny_run import generates, make_model_folder, tiny_run
from tests.services.coordinator.world import Recorder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

# Long phases, see generates().
STEPS, PROMPTS, GROUP = 7, 24, 4


@dataclass
class Killer:
    """SIGKILLs a server in the middle of step 2, a drafter trainer in step 3, the coordinator in step 4."""

    processes: dict[str, int] = field(default_factory=dict)
    killed: dict[str, int] = field(default_factory=dict)

    def learn(self, handles: dict[str, Any]) -> None:
        self.processes = {name: ray.get(h.process_id.remote(), timeout=60) for name, h in handles.items()}

    def watch(self, view: ProgressView) -> None:
        if generates(view):
            if view.step >= 2 and "rollout-1" not in self.killed:
                self._kill("rollout-1")
            elif view.step >= 3 and "drafter-0" not in self.killed:
                self._kill("drafter-0")
            elif view.step >= 4 and "coordinator" not in self.killed:
                self._kill("coordinator")

    def _kill(self, name: str) -> None:
        self.killed[name] = self.processes[name]
        os.kill(self.processes[name], signal.SIGKILL)


@dataclass
class Outcome:
    summary: dict[str, Any]
    observer: Recorder
    killer: Killer
    started: list[Any]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder: Path = tmp_path_factory.mktemp("run")
    config = tiny_run(
        make_model_folder(folder),
        folder,
        rollout={
            "num_servers": 2, "group_size": GROUP, "prompts_per_step": PROMPTS, "advance_budget_s": 0.05,
            "engine": {"type": "native", "max_running": GROUP, "max_len": 192}, "sampling": {"max_tokens": 120},
            "consolidate": {"enabled": True, "max_delay": 1.0, "min_freed_s": 0.0, "worth": 1.0},
        },
        run={"dir": str(folder), "steps": STEPS, "eval_prompts": 4, "compare_prompts": 2, "compare_repeats": 1},
    )  # fmt: skip
    killer, observer = Killer(), Recorder()
    observer.watch = killer.watch
    started: list[Any] = []
    before = descendants()  # what an earlier test left to this process, such as multiprocessing's resource tracker

    def on_start(handles: dict[str, Any]) -> None:
        killer.learn(handles)
        started.extend(p for p in descendants() if p not in before)

    summary = run_on_ray(config, observer, on_start=on_start)
    yield Outcome(summary, observer, killer, started)


def test_the_run_finishes_with_every_rollout_once(outcome: Outcome) -> None:
    assert set(outcome.killer.killed) == {"rollout-1", "drafter-0", "coordinator"}
    assert outcome.summary["status"] == "finished" and outcome.observer.summaries == [outcome.summary]
    assert [m.step for m in outcome.observer.steps] == list(range(1, STEPS + 1)), outcome.observer.events
    assert outcome.summary["rollouts"] == STEPS * PROMPTS * GROUP
    for groups in outcome.observer.groups.values():
        assert len(groups) == PROMPTS
        assert all([r.index for r in g.rollouts] == list(range(GROUP)) for g in groups)
        ids = [r.rollout_id for g in groups for r in g.rollouts]
        assert len(ids) == len(set(ids))


def test_the_losses_and_returns_are_told(outcome: Outcome) -> None:
    told = [(e.kind, e.subject) for e in outcome.observer.events]
    assert ("slot_lost", "rollout-1") in told and ("coordinator_lost", "coordinator") in told
    # it came back before the coordinator died, or to the one that took over
    last = outcome.observer.groups[STEPS]
    assert any(r.server == "rollout-1" for group in last for r in group.rollouts)
    assert ("drafter_lost", "drafter-0") in told
    assert any(s.role == "lost" and s.slot == "slot 1" for s in outcome.observer.spans)


def test_speculation_stays_lossless_after_the_losses(outcome: Outcome) -> None:
    assert outcome.summary["greedy_mismatches"] == 0 and outcome.summary["greedy_checked"] == 2
    assert outcome.summary["rollout_seconds_off"] > 0 and outcome.summary["rollout_seconds_on"] > 0
    assert all(m.logprob_gap < 1e-3 for m in outcome.observer.steps)
    assert all(abs(m.surprise_errors) < 6 for m in outcome.observer.steps), "responses are not the policy's"


def test_no_process_is_left(outcome: Outcome) -> None:
    assert outcome.started, "Ray's processes are our descendants"
    assert not still_running(outcome.started)
