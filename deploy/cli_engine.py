"""Measurements of the engine's drafting: `longtail bench switch`, `bench acceptance` and `bench rounds`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from deploy.cli_shared import config_of, errors_told

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]


def bench_switch(
    config: Annotated[str, typer.Option(help="Whose model and drafter to measure.")] = "pocket-demo",
    settings: Overrides = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repeats, after one for warm-up.")] = 5,
    running: Annotated[int, typer.Option(min=1, help="Requests under way.")] = 16,
    context: Annotated[int, typer.Option(min=256, help="Tokens that each of them has.")] = 4000,
    as_json: AsJson = False,
) -> None:
    """By how much decoding stalls when speculation goes on, and off, for requests with long contexts."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_switch import run_bench

        result = run_bench(resolved, repeats, running, context)
        if as_json:
            print(json.dumps(result))


def bench_acceptance(
    config: Annotated[str, typer.Option(help="Whose model and drafter to measure.")] = "pocket-demo",
    settings: Overrides = None,
    groups: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 8,
    siblings: Annotated[int, typer.Option(min=1, help="Rollouts of each.")] = 8,
    running: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Acceptance length with sampled and argmax drafts, chains, trees and suffixes, by temperature."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_acceptance import run_bench

        result = run_bench(resolved, groups, siblings, running)
        if as_json:
            print(json.dumps(result))


def bench_rounds(
    config: Annotated[str, typer.Option(help="Whose model, engine and strategies to measure.")] = "reasoner-e2e",
    settings: Overrides = None,
    cells: Annotated[str, typer.Option(help="REQUESTSxCONTEXT, several by comma.")] = "1x500,1x3000,4x1500,16x500",
    tokens: Annotated[int, typer.Option(min=8, help="Most tokens of a request in one go.")] = 400,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measured of each cell and strategy.")] = 2.5,
    as_json: AsJson = False,
) -> None:
    """What a round takes through a rollout server, by strategy, running requests and context (SGLang: needs a GPU)."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_rounds import parse_cells, run_bench

        result = run_bench(resolved, parse_cells(cells), tokens, seconds)
        if as_json:
            print(json.dumps(result))
