"""`longtail bench trl`: side by side with another trainer."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from deploy.cli_shared import config_of, errors_told, interrupt_on_sigterm


def bench_trl(
    config: Annotated[str, typer.Option(help="Whose model, prompts and settings to compare with.")] = "pocket-learn",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps of each run.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side, with seeds run.seed, run.seed + 1 ...")] = 2,
    micro_batch: Annotated[int, typer.Option(min=1, help="Responses in a forward pass of TRL's training.")] = 32,
    trl_threads: Annotated[int, typer.Option(min=1, help="Threads of TRL's process.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Seconds per step and reward curves beside TRL's GRPOTrainer, on this machine's CPU; needs trl."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_trl import TheirSettings, run_bench

        interrupt_on_sigterm()
        result = run_bench(resolved, steps, repeats, TheirSettings(micro_batch, trl_threads))
        if as_json:
            print(json.dumps(result))
