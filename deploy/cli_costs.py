"""`longtail bench selector` and `longtail bench costs`: choosing strategies, and what rounds cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from deploy.cli_shared import config_of, errors_told

AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]


def add_benches(bench_app: typer.Typer) -> None:
    bench_app.command("selector")(bench_selector)
    bench_app.command("costs")(bench_costs)


def bench_selector(
    repeats: Annotated[int, typer.Option(min=1, help="Seeds: requests, prices and calibration differ.")] = 3,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of each selector on recorded cost tables and made-up acceptance; needs no GPU. Minutes."""
    with errors_told():
        from deploy.bench_selector import run_bench

        result = run_bench(repeats, seed)
        if as_json:
            print(json.dumps(result))


def bench_costs(
    config: Annotated[str, typer.Option(help="Whose model to measure.")] = "pocket-demo",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Seconds of the native engine's rounds by stage, strategy, batch size and context, and a table fitted to them."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_costs import run_bench

        result = run_bench(resolved, seconds)
        if as_json:
            print(json.dumps(result))
