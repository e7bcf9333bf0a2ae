"""A run folder with checkpoints of a tiny model, written by the real trainer, in a second or two."""

from __future__ import annotations

from pathlib import Path

from deploy.inputs import needs_drafter
from services.core.acceptance import AcceptanceStats
from services.core.checkpoints import CheckpointNote, CheckpointPlan, DataPosition
from services.core.types import EvalResult, FinishReason, Rollout, SamplingParams, TrainBatch
from services.drafter.checkpoint import starting_state
from services.policy.service import build_policy_service
from services.report.run_folder import RunFolder
from tests.deploy.tiny_run import make_model_folder, tiny_run

STEPS = (1, 2, 3)
REWARDS = {1: 0.2, 2: 0.6, 3: 0.4}


def rollout(step: int, index: int) -> Rollout:
    ids = tuple(4 + (step + index + k) % 12 for k in range(8))
    return Rollout(f"g{step}", f"p{step}", index, index, ids[:4], ids, (-2.0,) * 8, "", FinishReason.STOP,
                   SamplingParams(), (step - 1,), (), AcceptanceStats())  # fmt: skip


def make_served_run(folder: Path) -> Path:
    """Policy versions 1 to 3 with drafter versions 11 to 13, the second with the highest held-out reward."""
    run = {"dir": str(folder / "runs"), "steps": 3, "compare_prompts": 0}
    config = tiny_run(make_model_folder(folder), folder / "runs", run=run, policy={"threads": 1, "learning_rate": 0.01})
    assert needs_drafter(config)
    made = RunFolder(config)
    trainer = build_policy_service(config, checkpoints=CheckpointPlan(made.checkpoints))
    for step in STEPS:
        trainer.train_step(TrainBatch(step, (rollout(step, 0), rollout(step, 1)), (1.0, -1.0)))
        trainer.checkpoint(CheckpointNote(step, 10 + step, DataPosition("abc")), starting_state(config))
        trainer.flush(60)
        made.evaluation(EvalResult(step, float(step), 4, 4, REWARDS[step], REWARDS[step]))
    made.close()
    return made.path
