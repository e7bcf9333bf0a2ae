"""Benchmarks that need a GPU and an SGLang engine whose selector has several strategies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli_shared import config_of, errors_told

Config = Annotated[str, typer.Option(help="Whose model, engine and selector to measure.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]


def bench_tailed(
    config: Config = "reasoner-adaptive",
    settings: Settings = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repeats, after one for warm-up.")] = 5,
    rollouts: Annotated[int, typer.Option(min=2, help="Of one batch.")] = 128,
    modes: Annotated[str | None, typer.Option(help="Only these, by comma: off, a chain's name, ...; ours.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for tailed.json and tailed.svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """A long-tailed batch with OFF, fixed chains, SGLang's own adaptive depth and our selector, interleaved."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_tailed import run_bench

        _end(run_bench(resolved, repeats, rollouts, out, modes), as_json)


def bench_graphs(config: Config = "reasoner-adaptive", settings: Settings = None, as_json: AsJson = False) -> None:
    """GPU memory of captured graphs: one strategy, every strategy for every batch size, and the pool."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_graphs import run_bench

        _end(run_bench(resolved), as_json)


def _end(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
