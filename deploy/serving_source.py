"""Where the weights come from that are served: a run folder's checkpoints, or a model folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from deploy.cli_shared import config_of
from deploy.inputs import needs_drafter
from services.config.schema import ClusterConfig
from services.core.checkpoints import step_folder, step_of, whole_checkpoints
from services.core.errors import ConfigError, DataError
from services.core.types import ServedVersions
from services.drafter.state import read_drafter
from services.models.files import model_dir, read_config, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_folder, drafter_method
from services.policy.checkpoint import read_served
from services.report.history import CHECKPOINTS, METRICS
from services.report.records import read_lines
from services.rollout.generator import ModelWeights

PRESET = "serve"  # for a model folder; a run has its own configuration


class ModelSource(BaseModel):
    """`path`: a run folder, or a model folder ("pocket" is the shipped one). `checkpoint`: of a run, its step or which;
    "best" has the highest held-out reward. `drafter`: a drafter folder in place of the one that belongs to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    checkpoint: int | Literal["newest", "best"] = "newest"
    drafter: str | None = None

    @property
    def is_run(self) -> bool:
        return (Path(self.path) / "config.yaml").is_file()

    @property
    def name(self) -> str:
        """What clients call the model, unless it is given another name."""
        return Path(self.path).resolve().name if self.path != "pocket" else "pocket"


def serving_config(source: ModelSource, settings: Sequence[str] = ()) -> ClusterConfig:
    """Engine and strategies: those of the run, or of the preset `serve`, with overrides. Raises ConfigError."""
    if source.is_run:
        return config_of(str(Path(source.path) / "config.yaml"), settings)
    if source.path != "pocket" and not (Path(source.path) / "config.json").is_file():
        raise ConfigError(f"{source.path} is no run folder (config.yaml) and no model folder (config.json)")
    return config_of(PRESET, settings, [f"model.path={json.dumps(source.path)}"])


def checkpoint_of(source: ModelSource) -> Path:
    """Raises DataError when the run has no such checkpoint."""
    folder = Path(source.path) / CHECKPOINTS
    steps = [step_of(place) for place in whole_checkpoints(folder)]
    if not steps:
        raise DataError(
            f"{source.path} has no checkpoint yet: wait for the first one, or train with run.checkpoint_every above 0"
        )
    if source.checkpoint == "newest":
        return step_folder(folder, steps[-1])
    if source.checkpoint == "best":
        return step_folder(folder, _best(Path(source.path), steps))
    if source.checkpoint not in steps:
        known = ", ".join(map(str, steps))
        raise DataError(f"{source.path} has no checkpoint of step {source.checkpoint}: there are those of {known}")
    return step_folder(folder, source.checkpoint)


def _best(run: Path, steps: Sequence[int]) -> int:
    rows = read_lines(run / METRICS)[0]
    rewards = {r["step"]: r["reward_mean"] for r in rows if r.get("kind") == "evaluation" and r["step"] in steps}
    judged = {step: reward for step, reward in rewards.items() if reward is not None}
    if not judged:
        raise DataError(f"{run}: no checkpoint was evaluated (run.eval_every, run.keep_best): ask for the newest")
    return max(judged, key=lambda step: (judged[step], step))


def read_weights(source: ModelSource, config: ClusterConfig) -> ModelWeights:
    """Raises DataError and WeightError for what cannot be served."""
    spec = model_spec(read_config(model_dir(config.model.path)))
    if source.is_run:
        found = read_served(checkpoint_of(source), spec)
        weights = ModelWeights(ServedVersions(found.policy_version, found.drafter_version), found.policy, found.drafter)
    else:
        weights = ModelWeights(ServedVersions(0, None), read_tensors(model_dir(config.model.path)))
    if not needs_drafter(config):
        return ModelWeights(ServedVersions(weights.versions.policy, None), weights.policy)
    if weights.drafter is not None and source.drafter is None:
        return weights
    method = drafter_method(config.drafter, spec)
    folder = Path(source.drafter) if source.drafter else drafter_folder(config)
    return ModelWeights(ServedVersions(weights.versions.policy, 0), weights.policy, read_drafter(folder, method))
