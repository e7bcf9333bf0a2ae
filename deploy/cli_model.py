"""`longtail model`: model folders made ready for a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli_shared import errors_told
from services.core.errors import ConfigError

DTYPES = ("float32", "bfloat16")

model_app = typer.Typer(help="Make model folders ready for a run.", no_args_is_help=True)


@model_app.callback()
def _group() -> None:
    """Keeps `convert` a command by name, also while it is the only one."""


@model_app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(metavar="FILE.gguf|FOLDER", help="A GGUF file or a Hugging Face folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write; must not hold anything yet.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    tokenizer: Annotated[Path | None, typer.Option(help="A folder whose tokenizer to take instead.")] = None,
) -> None:
    """Write a model folder that `model.path` takes: safetensors, config.json, tokenizer.json."""
    with errors_told():
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype!r} must be one of {', '.join(DTYPES)}")
        if not source.exists():
            raise ConfigError(f"{source} is not there: name a GGUF file or a model folder")
        from dataclasses import asdict

        from services.models.convert import convert_model

        print(json.dumps(asdict(convert_model(source, out, dtype, tokenizer))))
