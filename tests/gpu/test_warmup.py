"""`longtail warmup` on a GPU, in small: target and drafters are trained there, where the states of responses lie."""

from __future__ import annotations

from pathlib import Path

from deploy.warmup import run_warmup
from services.config.load import load_config
from tests.gpu.cases import PRESETS

NEEDS_MODEL = False  # for the folder's conftest
OVERRIDES = (
    "model.device=cuda", "placement.gpus_per_slot=0.5", "placement.policy_gpus=0.5", "warmup.steps=20",
    "warmup.drafter_steps=5", "warmup.drafter_rollouts=8", "warmup.eval_prompts=8",
    "warmup.drafter_methods=[eagle, eagle3]",
)  # fmt: skip


def test_a_model_and_its_drafters(tmp_path: Path) -> None:
    config = load_config("pocket-warmup", overrides=OVERRIDES, presets_dir=PRESETS)
    result = run_warmup(config, tmp_path / "made", print)
    assert result.device != "cpu"
    assert result.heldout_loss_after is not None and result.heldout_loss_before is not None
    assert result.heldout_loss_after < result.heldout_loss_before
    assert [d.method for d in result.drafters] == ["eagle", "eagle3"]
    assert all(d.acceptance_length >= 1 for d in result.drafters)
