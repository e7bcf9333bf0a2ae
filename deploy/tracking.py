"""A run's figures for experiment trackers, beside the JSONL files of its folder: TensorBoard, Weights & Biases, MLflow.

A tracker is told scalars by step. A step that comes again (the policy trainer died, or the run went on from an earlier
checkpoint) takes the place of what was told of it, as far as the tracker can forget.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from services.config.load import dump_config
from services.config.schema import ClusterConfig, Tracker
from services.core.errors import ConfigError
from services.core.types import EvalResult, StepMetrics

TENSORBOARD_FOLDER = "tensorboard"


class Writer(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, status: str) -> None:
        """`status`: finished, stopped or failed."""


class Tracking:
    """A RunObserver that hands the scalars of steps and evaluations on; whatever else is told does not matter to it."""

    def __init__(self, writers: list[Writer]) -> None:
        self._writers = writers

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: None

    def step(self, metrics: StepMetrics) -> None:
        self._log(scalars("step", asdict(metrics)), metrics.step)

    def evaluation(self, result: EvalResult) -> None:
        self._log(scalars("heldout", asdict(result)), result.step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.close(str(summary["status"]))

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for writer in self._writers:
            writer.log(values, step)


def scalars(group: str, record: Mapping[str, Any]) -> dict[str, float]:
    """`group/name` for every finite number, `group/name/key` for those in mappings. Flags, texts and lists are none."""
    found = {}
    for name, value in record.items():
        inside = {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, number in inside.items():
            if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
                found[f"{group}/{key}"] = float(number)
    return found


def start_tracking(config: ClusterConfig, run_dir: Path, after_step: int) -> Tracking:
    """`after_step`: the step that the run goes on after. Raises ConfigError when a tracker's package is not there."""
    makers: dict[Tracker, Callable[[ClusterConfig, Path, int], Writer]] = {
        "tensorboard": TensorBoardWriter,
        "wandb": WandbWriter,
        "mlflow": MlflowWriter,
    }
    return Tracking([makers[name](config, run_dir, after_step) for name in config.run.tracking])


class TensorBoardWriter:
    """Event files under RUN_DIR/tensorboard."""

    def __init__(self, config: ClusterConfig, run_dir: Path, after_step: int) -> None:
        self._folder, self._last = str(run_dir / TENSORBOARD_FOLDER), after_step
        self._writer = self._opened(after_step + 1 if after_step else None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step < self._last:  # done again: what was told of it and of later steps is purged
            self._writer.close()
            self._writer = self._opened(step)
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()

    def _opened(self, purge_step: int | None) -> Any:
        from tensorboardX import SummaryWriter

        # Its file names tell seconds apart: of two in one second the later would overwrite the earlier.
        return SummaryWriter(self._folder, purge_step=purge_step, filename_suffix=f".{time.time_ns()}")


class WandbWriter:
    """Where the run is logged is wandb's own setting (WANDB_PROJECT, WANDB_MODE, WANDB_API_KEY). Steps are a value of
    their own, since wandb's step only grows."""

    def __init__(self, config: ClusterConfig, run_dir: Path, after_step: int) -> None:
        wandb = _package("wandb")
        settings = config.model_dump(mode="json")
        self._run = wandb.init(id=run_dir.name, name=run_dir.name, dir=str(run_dir), config=settings, resume="allow")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class MlflowWriter:
    """Where the run is logged is mlflow's own setting (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME). A run that goes on
    finds its earlier part by the run id, kept as the tag `longtail.run_id`."""

    TAG = "longtail.run_id"

    def __init__(self, config: ClusterConfig, run_dir: Path, after_step: int) -> None:
        self._mlflow = _package("mlflow")
        earlier = self._mlflow.search_runs(
            filter_string=f"tags.`{self.TAG}` = '{run_dir.name}'", max_results=1, output_format="list"
        )
        self._mlflow.start_run(
            run_id=earlier[0].info.run_id if earlier else None, run_name=run_dir.name, tags={self.TAG: run_dir.name}
        )
        self._mlflow.log_text(dump_config(config), "config.yaml")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, status: str) -> None:
        self._mlflow.end_run({"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"run.tracking names {name}, which cannot be imported ({error}): pip install 'longtail-rl[{name}]', or "
            "leave it out"
        ) from error
