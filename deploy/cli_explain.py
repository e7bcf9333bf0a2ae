"""`longtail explain`: what a run's selector chose, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli_shared import errors_told


def explain(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder; the run may go on meanwhile.")],
    step: Annotated[int | None, typer.Option(help="Tell this step in detail; default: the last one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead.")] = False,
) -> None:
    """Say which draft strategy ran when and why, and what the selector's choice gained."""
    with errors_told():
        from deploy.explanation import explain as tell  # reads Parquet, among others

        tell(run_dir, step, as_json)
