"""`longtail train`: check everything, write the resolved configuration, run, tell where the report is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.config.schema import ClusterConfig
from services.core.errors import DataError

# What a person wants to know first, in this order; the rest is in summary.json.
_SHOWN = {
    "status": "status",
    "steps": "policy steps",
    "rollouts": "rollouts",
    "heldout_reward_before": "held-out reward before",
    "heldout_reward_after": "held-out reward after",
    "acceptance_length_first": "acceptance length, first step",
    "acceptance_length_last": "acceptance length, last step",
    "acceptance_length_frozen_last": "the same with the first drafter",
    "idle_seconds": "idle slot seconds",
    "drafting_seconds": "of these spent drafting",
    "rollout_seconds_off": "rollout seconds, speculation off",
    "rollout_seconds_on": "rollout seconds, speculation on",
    "greedy_mismatches": "greedy mismatches",
    "wall_seconds": "wall clock seconds",
}


def check_inputs(config: ClusterConfig) -> None:
    """Everything a run reads must be there and usable before anything starts. Raises DataError."""
    from services.data.source import load_prompts
    from services.models.files import drafter_dir, model_dir
    from services.models.tokenizer import load_tokenizer

    model_dir(config.model.path)
    if any(s.drafter == "eagle" for s in config.speculation.strategies):
        folder = drafter_dir(config.model.path)
        if not (folder / "config.json").is_file():
            raise DataError(
                f"no drafter at {folder}: run `longtail warmup CONFIG` to make one, or choose a strategy that needs "
                "none (speculation.selector.strategy.drafter: suffix or off)"
            )
    sets = load_prompts(config, load_tokenizer(config.model.path))
    if config.run.eval_prompts > len(sets.heldout):
        raise DataError(
            f"run.eval_prompts is {config.run.eval_prompts}, but only {len(sets.heldout)} prompts are held out: lower "
            "it, or raise data.heldout_fraction or the size of the prompt set"
        )
    if sets.skipped:
        print(f"left out {len(sets.skipped)} bad rows (see `longtail data check`)", file=sys.stderr)


def train(config: ClusterConfig, *, quiet: bool = False) -> Mapping[str, Any]:
    """One run, start to report. Returns the summary."""
    check_inputs(config)
    from services.report.run_folder import RunFolder

    folder = RunFolder(config)  # writes the resolved configuration
    console = Console()
    console.print(f"run folder: {folder.path}", soft_wrap=True, highlight=False)
    try:
        summary = _run(config, folder, console, quiet)
    except KeyboardInterrupt:
        _tell_report(console, folder.path)
        raise
    console.print(_table(summary))
    _tell_report(console, folder.path)
    return summary


def _run(config: ClusterConfig, folder: Any, console: Console, quiet: bool) -> Mapping[str, Any]:
    raise NotImplementedError


def _table(summary: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    for key, label in _SHOWN.items():
        value = summary.get(key)
        if value is not None:
            table.add_row(label, f"{value:.3f}" if isinstance(value, float) else str(value))
    return table


def _tell_report(console: Console, run_dir: Path) -> None:
    report = run_dir / "report.html"
    if report.is_file():
        console.print(f"report: {report}", soft_wrap=True, highlight=False)
