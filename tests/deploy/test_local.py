"""The whole system with its real services in one process."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from deploy.local import run_local
from deploy.resuming import start_of
from services.core.checkpoints import whole_checkpoints
from services.core.errors import StopRequested
from services.drafter.checkpoint import starting_state
from services.report.run_folder import VALUES_FILE, RunFolder
from tests.deploy.tiny_run import make_model_folder, tiny_run
from tests.services.coordinator.world import Recorder
from tests.services.energy.scripted import ScriptedReader

torch.set_num_threads(1)

SUMMARY_KEYS = {
    "heldout_reward_before", "heldout_reward_after", "acceptance_length_first", "acceptance_length_last",
    "acceptance_length_frozen_last", "acceptance_length_live_last_offline", "idle_seconds", "drafting_seconds",
    "rollout_seconds_off", "rollout_seconds_on", "greedy_mismatches", "rollouts", "groups", "steps", "status",
    "policy_version", "drafter_version", "wall_seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def test_every_part_of_a_run_works_together(model: Path, tmp_path: Path) -> None:
    observer = Recorder()
    exported = []
    config = tiny_run(model, tmp_path)
    summary = run_local(config, observer, on_drafter=lambda version, tensors: exported.append((version, tensors)))

    assert summary.keys() >= SUMMARY_KEYS and summary["status"] == "finished"
    assert (summary["steps"], summary["groups"], summary["rollouts"]) == (3, 12, 48)
    # An untrained model earns the same reward everywhere in some steps: those have nothing to learn and no new version.
    assert summary["policy_version"] == observer.steps[-1].policy_version <= 3
    assert summary["greedy_mismatches"] == 0 and summary["greedy_checked"] == 2
    assert all(summary[key] is not None for key in SUMMARY_KEYS)
    for groups in observer.groups.values():
        assert all([r.index for r in g.rollouts] == [0, 1, 2, 3] for g in groups)
        assert {r.server for g in groups for r in g.rollouts} == {"rollout-0", "rollout-1"}
    served = 0
    for metrics in observer.steps:
        assert {v for g in observer.groups[metrics.step] for r in g.rollouts for v in r.policy_versions} == {served}
        served = metrics.policy_version
        assert metrics.logprob_gap < 1e-3, "engine and trainer disagree about the logprobs"
        assert metrics.acceptance_length >= 1 and metrics.acceptance_length_frozen_offline is not None
    ((version, tensors),) = exported
    assert version == summary["drafter_version"] and all(torch.isfinite(t).all() for t in tensors.values())


def test_the_native_engine_hands_its_own_hidden_states_to_the_drafter(model: Path, tmp_path: Path) -> None:
    observer = Recorder()
    config = tiny_run(
        model, tmp_path,
        drafter={"states": "engine", "pack_tokens": 256, "micro_step_budget_s": 0.05, "training": {"when": "always"}},
        run={"dir": str(tmp_path / "runs"), "steps": 2, "eval_prompts": 0, "compare_prompts": 0},
    )  # fmt: skip
    run_local(config, observer)
    assert len(observer.steps) == 2
    # Whether a slot was idle long enough to train is chance; that there were states to judge the drafter on is not.
    assert observer.steps[-1].acceptance_length_live_offline is not None, "no hidden states reached the drafter"
    assert "states_dropped" not in {e.kind for e in observer.events}


def test_a_run_on_a_gpu_leaves_its_joules_in_the_run_folder(model: Path, tmp_path: Path) -> None:
    config = tiny_run(
        model, tmp_path, run={"dir": str(tmp_path / "runs"), "steps": 2, "eval_prompts": 2, "compare_prompts": 0}
    )
    folder = RunFolder(config)
    reader = ScriptedReader(time.monotonic, {"GPU-a": lambda t: 250.0 * t}, {"3": "GPU-a"})
    run_local(config, folder, gpu="3", open_reader=lambda entries: reader)

    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert len(steps) == 2
    for row in steps:
        spans = [json.loads(line) for line in (folder.path / "spans.jsonl").read_text().splitlines()]
        own = [s for s in spans if s["label"] == f"step {row['step']}"]
        # All share the one GPU: from the step's begin to its record each second has its 250 J.
        lasted = row["at_s"] - min(s["start_s"] for s in own)
        assert sum(row["energy_j"].values()) == pytest.approx(250.0 * lasted, rel=0.2)
        # Idle slots take nothing from the policy while it trains; one whose last micro-step is not over shares.
        trained = 250.0 * sum(s["end_s"] - s["start_s"] for s in own if s["role"] == "policy")
        assert trained / 3 * 0.8 < row["energy_j"]["policy"] < trained * 1.2
        assert row["energy_j"]["rollout"] + row["energy_j"]["draining"] > 0
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["energy_method"] == "counter" and summary["energy_steps"] == 2
    assert "Joules by role" in (folder.path / "report.html").read_text()
    assert reader.closed, "the sampling thread outlived the run"


def test_a_run_goes_on_from_the_drafter_of_the_one_before(model: Path, tmp_path: Path) -> None:
    config = tiny_run(
        model,
        tmp_path,
        rollout={"prompts_per_step": 1, "group_size": 16, "advance_budget_s": 0.05},  # the other slot is idle
        drafter={"checkpoint_dir": str(tmp_path / "kept"), "pack_tokens": 256},
        run={"dir": str(tmp_path), "steps": 2, "eval_prompts": 0, "compare_prompts": 0},
    )
    run_local(config, Recorder())
    give_up = time.monotonic() + 120
    while not whole_checkpoints(tmp_path / "kept"):
        assert time.monotonic() < give_up, "nothing was written"
        time.sleep(0.05)
    state = starting_state(config)
    assert state["total_steps"] > 0
    run_local(config, Recorder())
    assert starting_state(config)["total_steps"] >= state["total_steps"]


def test_without_speculation_no_drafter_is_needed(model: Path, tmp_path: Path) -> None:
    config = tiny_run(model, tmp_path, speculation={"selector": {"type": "fixed"}}, run={"steps": 1, "eval_prompts": 0})
    summary = run_local(config, Recorder())
    assert summary["status"] == "finished" and summary["acceptance_length_first"] is None


def test_an_interrupted_observer_ends_the_run_and_is_finished(model: Path, tmp_path: Path) -> None:
    class Impatient(Recorder):
        def step(self, metrics) -> None:  # type: ignore[no-untyped-def]
            raise StopRequested("enough")

    observer = Impatient()
    with pytest.raises(StopRequested):
        run_local(tiny_run(model, tmp_path), observer)
    assert [s["status"] for s in observer.summaries] == ["stopped"]


def test_the_totals_of_a_resumed_run_go_on(model: Path, tmp_path: Path) -> None:
    """Row 76: across drivers too, by the run folder."""
    totals = []
    for steps in (2, 3):
        run = {"id": "again", "dir": str(tmp_path), "steps": steps, "eval_prompts": 2, "compare_prompts": 0}
        config = tiny_run(model, tmp_path, run={**run, "checkpoint_every": 1})
        folder = RunFolder(config)
        run_local(config, folder, start=start_of(config, folder))
        values = json.loads((folder.path / VALUES_FILE).read_text())
        totals.append({key: numbers[0] for key, numbers in values.items() if key.partition("|")[0].endswith("_total")})
    before, after = totals
    assert before["longtail_steps_total"] == 2 and after["longtail_steps_total"] == 3
    assert all(after[key] >= number for key, number in before.items())
    assert after["longtail_coordinator_restarts_total"] == 0 and after["longtail_events_total|run_resumed"] == 1
