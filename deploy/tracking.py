"""A run's figures for experiment trackers, beside the JSONL files of its folder: TensorBoard, Weights & Biases, MLflow.

A tracker is told scalars by step. A step that comes again (the policy trainer died, or the run went on from an earlier
checkpoint) takes the place of what was told of it, as far as the tracker can forget. A tracker that does not take the
run ends it before it starts; one that fails later is told in the run's events and left out, since the folder has all.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from services.config.load import dump_config
from services.config.schema import ClusterConfig, Tracker
from services.core.errors import ConfigError
from services.core.types import EvalResult, RunEvent, StepMetrics

TENSORBOARD_FOLDER = "tensorboard"


class Writer(Protocol):
    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What troubles of its service are raised as."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, status: str) -> None:
        """`status`: finished, stopped or failed."""


class Tracking:
    """A RunObserver that hands the scalars of steps and evaluations on; whatever else is told does not matter to it."""

    def __init__(self, writers: Mapping[str, Writer], tell: Callable[[RunEvent], None]) -> None:
        self._writers, self._tell = dict(writers), tell
        self._last_s = 0.0  # of the run, when something was told last

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: None

    def step(self, metrics: StepMetrics) -> None:
        self._log(scalars("step", asdict(metrics)), metrics.step, metrics.at_s)

    def evaluation(self, result: EvalResult) -> None:
        self._log(scalars("heldout", asdict(result)), result.step, result.at_s)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._each(lambda writer: writer.close(str(summary["status"])))

    def _log(self, values: Mapping[str, float], step: int, at_s: float) -> None:
        self._last_s = at_s
        self._each(lambda writer: writer.log(values, step))

    def _each(self, action: Callable[[Writer], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                action(writer)
            except writer.errors as error:
                del self._writers[name]
                message = f"{_first_line(error)}; nothing more is logged there, the run folder has everything"
                self._tell(RunEvent(self._last_s, "tracker_lost", name, message))


def scalars(group: str, record: Mapping[str, Any]) -> dict[str, float]:
    """`group/name` for every finite number, `group/name/key` for those in mappings. Flags, texts and lists are none."""
    found = {}
    for name, value in record.items():
        inside = {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, number in inside.items():
            if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
                found[f"{group}/{key}"] = float(number)
    return found


def start_tracking(config: ClusterConfig, run_dir: Path, after_step: int, tell: Callable[[RunEvent], None]) -> Tracking:
    """`after_step`: the step that the run goes on after. Raises ConfigError when a tracker's package is not there, or
    its service does not take the run."""
    makers: dict[Tracker, Callable[[ClusterConfig, Path, int], Writer]] = {
        "tensorboard": TensorBoardWriter,
        "wandb": WandbWriter,
        "mlflow": MlflowWriter,
    }
    return Tracking({name: makers[name](config, run_dir, after_step) for name in config.run.tracking}, tell)


class TensorBoardWriter:
    """Event files under RUN_DIR/tensorboard."""

    errors = (OSError,)

    def __init__(self, config: ClusterConfig, run_dir: Path, after_step: int) -> None:
        self._folder, self._last = str(run_dir / TENSORBOARD_FOLDER), after_step
        self._told: set[str] = set()  # of the last step
        self._writer = self._opened(after_step + 1 if after_step else None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        again = step < self._last or (step == self._last and bool(self._told & values.keys()))
        if again:  # what was told of it and of later steps is purged
            self._writer.close()
            self._writer = self._opened(step)
        if again or step > self._last:
            self._told.clear()
        self._last = step
        self._told.update(values)
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
        self.errors = (wandb.errors.Error,)
        settings, name = config.model_dump(mode="json"), run_dir.name
        with _refusal("wandb", self.errors, "log in (`wandb login`), or set WANDB_MODE=offline"):
            self._run = wandb.init(id=name, name=name, dir=str(run_dir), config=settings, resume="allow")
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
        self.errors = (self._mlflow.exceptions.MlflowException,)
        with _refusal("mlflow", self.errors, "set MLFLOW_TRACKING_URI to a server that answers, or to a folder"):
            self._begin(config, run_dir.name)

    def _begin(self, config: ClusterConfig, name: str) -> None:
        earlier = self._mlflow.search_runs(
            filter_string=f"tags.`{self.TAG}` = '{name}'", max_results=1, output_format="list"
        )
        known = earlier[0].info.run_id if earlier else None
        self._mlflow.start_run(run_id=known, run_name=name, tags={self.TAG: name})
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


@contextmanager
def _refusal(name: str, errors: tuple[type[Exception], ...], remedy: str) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise ConfigError(
            f"run.tracking names {name}, which does not take the run: {_first_line(error)}: {remedy}, or leave it out"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
