"""`longtail bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli_shared import errors_told


def bench_serve(
    model: Annotated[str, typer.Option(help='A model folder, or "pocket".')] = "pocket",
    drafter: Annotated[Path | None, typer.Option(help="To begin with; default: one that never learned.")] = None,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 3.0,
    seconds: Annotated[float, typer.Option(min=1, help="Of load, for each server.")] = 60.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of servers.")] = 1,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of both servers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Learning from what is served against not learning: latency, acceptance and failures under a steady load."""
    with errors_told():
        from deploy.bench_serve import LoadPlan, run_bench, table

        result = run_bench(model, drafter, LoadPlan(rate, seconds, max_tokens), settings or (), repeats)
        print(table(result))
        if as_json:
            print(json.dumps(result))
