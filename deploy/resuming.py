"""From a run folder to where its run goes on: the newest checkpoint that the folder's records reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.naming import nameless_run_id
from services.config.schema import ClusterConfig
from services.coordinator.resume import Takeover
from services.core.checkpoints import CheckpointPlan, step_of, whole_checkpoints
from services.report.run_folder import RunFolder

# Cuts the run folder back to the last checkpoint and names it: for a run whose policy trainer died.
GoBack = Callable[[], CheckpointPlan]


@dataclass(frozen=True, slots=True)
class Start:
    """`run_id` is part of the actors' names; `checkpoints` None: none are written; `takeover` None: a new run."""

    run_id: str
    checkpoints: CheckpointPlan | None = None
    takeover: Takeover | None = None

    def fitted(self, config: ClusterConfig) -> ClusterConfig:
        """`config` as this start allows it: no checkpoints where there is no folder for them."""
        if self.checkpoints is not None:
            return config
        return config.model_copy(update={"run": config.run.model_copy(update={"checkpoint_every": 0})})


def nameless_start() -> Start:
    """Of a run without a run folder: benchmarks and tests."""
    return Start(nameless_run_id())


def start_of(config: ClusterConfig, folder: RunFolder) -> Start:
    """Where the run in `folder` begins, or goes on. What was recorded after that is taken out of the folder."""
    kept = folder.checkpoints.resolve()
    if not folder.reopened:
        return Start(folder.run_id, CheckpointPlan(kept) if config.run.checkpoint_every else None)
    place = _newest(folder)
    history = folder.rewind(0 if place is None else step_of(place))
    folder.note_start(0 if place is None else step_of(place))
    takeover = Takeover(
        folder.incarnation,
        history.elapsed_s,
        history.steps,
        history.evaluations,
        history.events,
        values=folder.kept_values(),
        resumed=True,
    )
    plan = CheckpointPlan(kept, place) if config.run.checkpoint_every or place is not None else None
    return Start(folder.run_id, plan, takeover)


def go_back_in(folder: RunFolder) -> GoBack:
    def go_back() -> CheckpointPlan:
        place = _newest(folder)
        folder.rewind(0 if place is None else step_of(place))
        return CheckpointPlan(folder.checkpoints.resolve(), place)

    return go_back


def _newest(folder: RunFolder) -> Path | None:
    """The newest checkpoint that the folder's records reach."""
    recorded = folder.recorded_step()
    return max((p for p in whole_checkpoints(folder.checkpoints.resolve()) if step_of(p) <= recorded), default=None)
