"""Checkpoints of the policy trainer: what goes on from one is the trainer that wrote it, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.config.policy import PolicyConfig
from services.config.schema import ClusterConfig, ModelConfig
from services.core.checkpoints import CheckpointNote, CheckpointPlan, DataPosition, whole_checkpoints
from services.core.errors import BatchError, DataError
from services.core.types import TrainBatch
from services.policy.service import PolicyService, build_policy_service

DRAFTER = {
    "tensors": {"fc.weight": torch.arange(6.0).view(2, 3)},
    "optimizer": {"exp_avg": {"fc.weight": torch.ones(2, 3)}, "exp_avg_sq": {"fc.weight": torch.zeros(2, 3)}},
    "total_steps": 12,
    "updates": 11,
}
FRESH = {
    "tensors": {"fc.weight": torch.ones(1)},
    "optimizer": {"exp_avg": {}, "exp_avg_sq": {}},
    "total_steps": 0,
    "updates": 0,
}


def note_of(step: int, **changes: object) -> CheckpointNote:
    return CheckpointNote(step, 3, DataPosition("abc"), **changes)  # type: ignore[arg-type]


def service(
    model: Path, run: Path, start: Path | None = None, least_version: int = 0, **policy: object
) -> PolicyService:
    run.mkdir(exist_ok=True)
    settings = PolicyConfig.model_validate({"threads": 1, "learning_rate": 0.01, **policy})
    config = ClusterConfig(model=ModelConfig(path=str(model)), policy=settings)
    return build_policy_service(config, checkpoints=CheckpointPlan(run / "checkpoints", start, least_version))


def batch(make_rollout, step: int) -> TrainBatch:
    rollouts = tuple(make_rollout(i, group=f"step {step}", response=5 + step) for i in range(3))
    return TrainBatch(step, rollouts, (1.0, -1.0, 0.5))


def kept(built: PolicyService, run: Path, note: CheckpointNote, live=None, served=None) -> Path:
    built.checkpoint(note, live, served)
    built.flush(30)
    return whole_checkpoints(run / "checkpoints")[-1]


@pytest.mark.parametrize(
    ("kind", "tied", "policy"),
    [("qwen3", True, {}), ("llama", False, {"kl_coef": 0.1, "decay_steps": 9}), ("qwen2", False, {"inner_epochs": 2})],
)
def test_training_goes_on_bit_for_bit(model_folder, make_rollout, tmp_path, kind, tied, policy) -> None:
    """The reference of the KL term stays the first policy, not the one of the checkpoint."""
    folder = model_folder(kind, tied)
    first = service(folder, tmp_path / "a", **policy)
    for step in (1, 2):
        first.train_step(batch(make_rollout, step))
    place = kept(first, tmp_path / "a", note_of(2))
    again = service(folder, tmp_path / "b", place, **policy)
    assert (again.steps_done, again.version) == (2, 2)
    for step in (3, 4):
        reports = [built.train_step(batch(make_rollout, step))[0] for built in (first, again)]
        assert (reports[0].loss, reports[0].kl) == (reports[1].loss, reports[1].kl)
    mine, other = first._trainer.state(), again._trainer.state()
    assert mine.keys() == other.keys() and any(name.startswith("optimizer/step/") for name in mine)
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(model_folder, make_rollout, tmp_path) -> None:
    built = service(model_folder(), tmp_path)
    built.train_step(batch(make_rollout, 1))
    wanted = built._trainer.state()
    built.checkpoint(note_of(1))
    built.train_step(batch(make_rollout, 2))  # while it is written
    built.flush(30)
    (place,) = whole_checkpoints(tmp_path / "checkpoints")
    found = service(model_folder(), tmp_path, place)._trainer.state()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_before_the_first_update_there_are_no_moments(model_folder, make_rollout, tmp_path) -> None:
    built = service(model_folder(), tmp_path)
    no_signal = TrainBatch(1, (make_rollout(0), make_rollout(1)), (0.0, 0.0))
    built.train_step(no_signal)
    again = service(model_folder(), tmp_path, kept(built, tmp_path, note_of(1)))
    assert (again.steps_done, again.version) == (1, 0) and not again._trainer._optimizer.state


def test_drafters_and_the_note_come_back(model_folder, tmp_path) -> None:
    built = service(model_folder(), tmp_path)
    assert built.restored() == (None, None, None)
    note = note_of(0, drafter_ahead=True)
    again = service(model_folder(), tmp_path, kept(built, tmp_path, note, DRAFTER, FRESH))
    found, live, served = again.restored()
    assert found == note
    for tree, wanted in ((live, DRAFTER), (served, FRESH)):
        assert (tree["total_steps"], tree["updates"]) == (wanted["total_steps"], wanted["updates"])
        assert torch.equal(tree["tensors"]["fc.weight"], wanted["tensors"]["fc.weight"])
        for part in ("exp_avg", "exp_avg_sq"):
            assert tree["optimizer"][part].keys() == wanted["optimizer"][part].keys()
    assert torch.equal(live["optimizer"]["exp_avg"]["fc.weight"], torch.ones(2, 3))


def test_one_drafter_is_written_once(model_folder, tmp_path) -> None:
    built = service(model_folder(), tmp_path)
    place = kept(built, tmp_path, note_of(0), DRAFTER)
    assert list(json.loads((place / "manifest.json").read_text())["drafters"]) == ["drafter/live"]
    _, live, served = service(model_folder(), tmp_path, place).restored()
    assert served is live


def test_a_version_that_went_out_before_is_not_used_again(model_folder, make_rollout, tmp_path) -> None:
    built = service(model_folder(), tmp_path)
    built.train_step(batch(make_rollout, 1))
    place = kept(built, tmp_path, note_of(1))
    again = service(model_folder(), tmp_path, place, least_version=7)
    assert again.publish()[0] == 7
    again.train_step(batch_of_version(make_rollout, 2, 7))
    assert again.version == 8


def batch_of_version(make_rollout, step: int, version: int) -> TrainBatch:
    rollouts = tuple(make_rollout(i, group=f"step {step}", policy_versions=(version,)) for i in range(2))
    return TrainBatch(step, rollouts, (1.0, -1.0))


def test_a_checkpoint_of_another_step_is_refused(model_folder, make_rollout, tmp_path) -> None:
    """The coordinator would believe that a step is kept which is not."""
    built = service(model_folder(), tmp_path)
    built.train_step(batch(make_rollout, 1))
    with pytest.raises(BatchError, match="checkpoint of step 2 was asked for, the policy is at step 1"):
        built.checkpoint(note_of(2))


def test_another_model_is_refused(model_folder, tmp_path) -> None:
    place = kept(service(model_folder("qwen3"), tmp_path), tmp_path, note_of(0))
    with pytest.raises(DataError, match=r"is of another model.*another run\.id"):
        service(model_folder("llama"), tmp_path, place)
