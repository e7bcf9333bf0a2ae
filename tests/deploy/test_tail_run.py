"""A real run in which the tail moves: the trainer, which scores every token anew, finds nothing odd."""

from __future__ import annotations

from pathlib import Path

from deploy.local import run_local
from tests.deploy.tiny_run import make_model_folder, tiny_run
from tests.services.coordinator.world import Recorder


def test_moved_rollouts_are_trained_on_like_others(tmp_path: Path) -> None:
    config = tiny_run(
        make_model_folder(tmp_path),
        tmp_path,
        rollout={
            "consolidate": {"enabled": True, "max_delay": 1.0, "min_freed_s": 0.0, "worth": 1.0},
            "advance_budget_s": 0.01,
        },
        drafter={"micro_step_budget_s": 0.01, "pack_tokens": 256},
        run={"dir": str(tmp_path), "steps": 4, "eval_prompts": 0, "compare_prompts": 0},
    )
    observer = Recorder()
    summary = run_local(config, observer)
    assert summary["status"] == "finished" and summary["rollouts"] == 4 * 16
    assert [e for e in observer.events if e.kind == "tail_moved"], "nothing moved: the test shows nothing"
    assert all(m.logprob_gap < 1e-4 for m in observer.steps)
    for groups in observer.groups.values():
        assert all([r.index for r in g.rollouts] == [0, 1, 2, 3] for g in groups)
