"""`longtail train`: check everything, write the resolved configuration, run, tell where the report is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.cli_shared import interrupt_on_sigterm
from deploy.console import CONSOLE
from deploy.inputs import load_inputs, needs_drafter
from deploy.progress import ProgressDisplay
from deploy.remarks import remarks
from deploy.resuming import Start, go_back_in, start_of
from deploy.tracking import start_tracking
from deploy.uploading import bring, uploading
from services.config.schema import ClusterConfig
from services.coordinator.observer import Fanout
from services.core.errors import DataError, NothingTrainedError
from services.core.types import RunEvent
from services.drafter.export import write_drafter_folder
from services.models.files import GROWN_FILE, model_dir, read_config, read_grown
from services.models.layers import model_spec
from services.models.methods import drafter_folder, drafter_method
from services.report.run_folder import RunFolder, finished_summary

# What a person wants to know first, in this order; the rest is in summary.json.
_SHOWN = {
    "status": "status",
    "steps": "policy steps",
    "rollouts": "rollouts",
    "heldout_reward_before": "held-out reward before",
    "heldout_reward_after": "held-out reward after",
    "acceptance_length_first": "acceptance length, first steps",
    "acceptance_length_last": "acceptance length, last steps",
    "acceptance_length_live_last_offline": "on the last rollouts, live drafter",
    "acceptance_length_frozen_last": "on the last rollouts, first drafter",
    "idle_seconds": "slot seconds idle",
    "drafting_seconds": "slot seconds drafting",
    "rollout_seconds_off": "rollout seconds, speculation off",
    "rollout_seconds_on": "rollout seconds, speculation on",
    "greedy_mismatches": "greedy mismatches",
    "joules_per_step": "joules of the GPUs per step",
    "wall_seconds": "wall clock seconds",
}


def check_inputs(config: ClusterConfig) -> None:
    """Everything a run reads must be there and usable before anything starts. Raises DataError."""
    inputs = load_inputs(config)
    if needs_drafter(config):
        folder = drafter_folder(config)
        if not (folder / "config.json").is_file():
            raise DataError(
                f"no drafter at {folder}: make one with `longtail warmup`, or choose a strategy that needs none "
                "(speculation.selector.strategy.drafter: suffix or off)"
            )
    if config.run.eval_prompts > len(inputs.heldout):
        raise DataError(
            f"run.eval_prompts is {config.run.eval_prompts}, but only {len(inputs.heldout)} prompts are held out: "
            "lower it, or raise data.heldout_fraction or the size of the prompt set"
        )


def train(config: ClusterConfig, *, quiet: bool = False) -> None:
    """One run, start to report. Raises LongtailError when it does not finish; its folder is valid even then."""
    console = Console()
    over = finished_summary(config)
    if over is not None:
        _say(console, f"run {config.run.id} is finished, all {over['steps']} steps of it: nothing to do")
        _tell(console, config.run.dir / str(config.run.id))
        return
    check_inputs(config)
    if config.run.checkpoint_url is not None and config.run.id is not None:
        bring(config.run.checkpoint_url, config.run.id, config.run.dir, partial(_say, console))
    folder = RunFolder(config, say=partial(_say, console))  # writes the resolved configuration
    start = start_of(config, folder)
    _say(console, f"run folder: {folder.path}{_goes_on(start)}")
    grown = read_grown(model_dir(config.model.path))
    if grown is not None:  # the run's figures must say so wherever they are read
        (folder.path / GROWN_FILE).write_text(json.dumps(grown, indent=2) + "\n", encoding="utf-8")
        _say(console, f"model grown from {grown['grown_from']}: {grown['note']}")
    for remark in remarks(config):
        _say(console, f"note: {remark}")
    display = nullcontext() if quiet else ProgressDisplay(folder.latest_progress, console)
    try:
        with display, uploading(config, folder, start, partial(_say, console)):
            summary = _run(config, folder, start)
    finally:
        _tell(console, folder.path)
    if not summary["policy_version"]:
        raise NothingTrainedError(
            f"the run did its {summary['steps']} steps, but the policy is as it was: no step had rollouts "
            "of different rewards to learn from. Raise rollout.group_size or prompts_per_step, or take problems "
            "of which the model solves some"
        )


def _goes_on(start: Start) -> str:
    if start.takeover is None:
        return ""
    steps = len(start.takeover.steps)
    return f", goes on after step {steps}" if steps else ", begins again: it has no checkpoint"


def _run(config: ClusterConfig, folder: RunFolder, start: Start) -> dict[str, Any]:
    def export(_version: int, tensors: Mapping[str, Any]) -> None:
        target = read_config(model_dir(config.model.path))
        method = drafter_method(config.drafter, model_spec(target))
        write_drafter_folder(tensors, method, target, folder.drafter_dir, _micro_steps(folder.path))

    after_step = len(start.takeover.steps) if start.takeover else 0

    def tell(event: RunEvent) -> None:
        folder.event(event)
        CONSOLE.print(f"warning: {event.subject}: {event.message}")

    tracking: Any = start_tracking(config, folder.path, after_step, tell)
    observer: Any = Fanout(folder, tracking)
    if config.placement.mode == "local":
        from deploy.local import run_local

        return run_local(config, observer, on_drafter=export, start=start)
    from deploy.cluster import run_on_ray
    from deploy.session import ray_about

    def started(_handles: Mapping[str, Any]) -> None:
        interrupt_on_sigterm()
        folder.reachable_at(ray_about())

    return run_on_ray(
        config,
        observer,
        on_drafter=export,
        on_start=started,
        start=start,
        go_back=go_back_in(folder) if start.checkpoints is not None else None,
    )


def _micro_steps(run_dir: Path) -> int:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return sum(row["drafter_micro_steps"] for row in rows if row["kind"] == "step")


def _tell(console: Console, run_dir: Path) -> None:
    """The summary as a table and where the report is, as far as the run got."""
    summary, report = run_dir / "summary.json", run_dir / "report.html"
    if summary.is_file():
        console.print(summary_table(json.loads(summary.read_text(encoding="utf-8"))))
    if report.is_file():
        _say(console, f"report: {report}")


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)  # a path stays whole, to be copied


def summary_table(summary: Mapping[str, Any]) -> Table:
    """What was measured, of the figures that a person wants to know first."""
    table = Table(show_header=False)
    for key, label in _SHOWN.items():
        value = summary.get(key)
        if value is not None:
            table.add_row(label, f"{value:.3f}" if isinstance(value, float) else str(value))
    if summary.get("energy_j"):
        table.add_row(
            "joules by role, all steps", ", ".join(f"{r} {j:,.0f}" for r, j in summary["energy_j"].items() if j > 0)
        )
    return table
