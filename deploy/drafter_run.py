"""The drafter of a run, with the policy that it drafts for: from a checkpoint, or from what the run left at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from services.config.load import load_config
from services.config.schema import ClusterConfig
from services.core.checkpoints import step_folder, step_of, whole_checkpoints
from services.core.errors import ConfigError, DataError
from services.drafter.card import Origin
from services.drafter.state import read_drafter
from services.models.drafter import DrafterMethod
from services.models.files import model_dir, read_config
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.models.target import check_tensors
from services.policy.checkpoint import KIND, LIVE, SERVED, read_served
from services.report.history import CHECKPOINTS, METRICS
from services.report.records import read_lines
from services.weights.checkpoint import read_manifest


@dataclass(frozen=True)
class RunDrafter:
    """`policy`: the weights that it drafts for; None where the run kept no checkpoint. `step`: the policy step that the
    checkpoint followed."""

    config: ClusterConfig
    method: DrafterMethod
    tensors: Mapping[str, Tensor]
    policy: Mapping[str, Tensor] | None
    step: int | None
    origin: Origin

    @property
    def target(self) -> Path:
        return model_dir(self.config.model.path)


def read_run_drafter(run: Path, step: int | None = None, licence: str | None = None) -> RunDrafter:
    """The drafter served after `step` (None: after the last one kept). Raises ConfigError for what is no run, DataError
    for a run without that drafter."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is no run folder (it has no config.yaml): name a folder under runs/")
    config = load_config(run / "config.yaml")
    method = drafter_method(config.drafter, model_spec(read_config(model_dir(config.model.path))))
    place = _checkpoint(run, step)
    if place is not None:
        return _of_checkpoint(run, place, config, method, licence)
    tensors = read_drafter(run / "drafter", method)
    origin = Origin(run.resolve().name, config.model.path, None, None, None, _micro_steps(run), licence)
    return RunDrafter(config, method, tensors, None, None, origin)


def _checkpoint(run: Path, step: int | None) -> Path | None:
    kept = [step_of(place) for place in whole_checkpoints(run / CHECKPOINTS)]
    if step is None:
        if not kept and not (run / "drafter" / "config.json").is_file():
            raise DataError(
                f"{run} has no drafter: it kept no checkpoint and exported none; let it finish, or train with "
                "run.checkpoint_every above 0 and a strategy that drafts with EAGLE"
            )
        return step_folder(run / CHECKPOINTS, kept[-1]) if kept else None
    if step not in kept:
        known = ", ".join(map(str, kept)) or "none"
        raise DataError(f"{run} has no checkpoint of step {step}; kept are those after {known}: choose one with --step")
    return step_folder(run / CHECKPOINTS, step)


def _of_checkpoint(
    run: Path, place: Path, config: ClusterConfig, method: DrafterMethod, licence: str | None
) -> RunDrafter:
    found = read_served(place, method.target)
    if found.drafter is None:
        raise DataError(f"{place} has no drafter: the run drafted with none (speculation.selector)")
    check_tensors(found.drafter, method.names(), "drafter export")
    manifest = read_manifest(place, KIND)
    drafters = manifest["drafters"]
    state = drafters.get(SERVED, drafters[LIVE])
    origin = Origin(
        run.resolve().name,
        config.model.path,
        found.policy_version,
        found.drafter_version,
        manifest["note"]["data"]["fingerprint"],
        int(state["total_steps"]),
        licence,
    )
    return RunDrafter(config, method, found.drafter, found.policy, step_of(place), origin)


def _micro_steps(run: Path) -> int:
    return sum(row["drafter_micro_steps"] for row in read_lines(run / METRICS)[0] if row.get("kind") == "step")
