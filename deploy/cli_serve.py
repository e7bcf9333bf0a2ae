"""`longtail serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli_shared import errors_told, interrupt_on_sigterm
from services.core.errors import ConfigError

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")]


def serve(
    model: Annotated[str, typer.Argument(metavar="RUN", help='A run folder or a model folder, or "pocket".')],
    settings: Overrides = None,
    checkpoint: Annotated[str, typer.Option(help="Of a run: newest, best (held-out reward), or a step.")] = "newest",
    drafter: Annotated[Path | None, typer.Option(help="A drafter folder in place of the model's own.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default: the folder's name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    token_file: Annotated[Path | None, typer.Option(help="The bearer token; or set LONGTAIL_TOKEN.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines that always run.")] = 1,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Engines when many requests come.")] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Answers that wait in an engine; then 429.")] = 256,
    request_s: Annotated[float, typer.Option(min=0.1, help="Seconds that an answer may take.")] = 300.0,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file in place of the model's template.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A further name in the Host header.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Swap to newer checkpoints as the run goes on.")] = False,
    in_process: Annotated[bool, typer.Option("--in-process", help="One engine in this process, no Ray.")] = False,
    learn: Annotated[bool, typer.Option("--learn", help="Idle engines train the drafter on what is served.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --learn: where better drafters go; all engines see it.")
    ] = None,
) -> None:
    """Serve a policy with its drafter behind the OpenAI API, until Ctrl-C."""
    with errors_told():
        source = {"path": model, "checkpoint": _checkpoint(checkpoint), "drafter": drafter and str(drafter)}
        learn_to = _learn_to(learn, out)
        template = _text_of(chat_template) if chat_template is not None else None
        from deploy.serve_model import Where, serve_model
        from deploy.serving import ServeArguments

        args = ServeArguments.model_validate(
            {
                "source": source, "settings": settings or (), "name": name, "min_replicas": replicas,
                "max_replicas": max_replicas or replicas, "max_waiting": max_waiting, "request_s": request_s,
                "chat_template": template, "allow_hosts": allow_host or (), "learn_to": learn_to,
            }
        )  # fmt: skip
        interrupt_on_sigterm()
        serve_model(args, Where(host, port, token_file, follow, in_process))


def _checkpoint(word: str) -> str | int:
    if word in ("newest", "best"):
        return word
    try:
        return int(json.loads(word))
    except (ValueError, TypeError):
        raise ConfigError(f"--checkpoint {word!r}: newest, best, or the number of a step") from None


def _learn_to(learn: bool, out: Path | None) -> str | None:
    """Absolute: the engines may run elsewhere."""
    if learn != (out is not None):
        raise ConfigError("--learn and --out DIR go together: better drafters are put into the folder")
    return None if out is None else str(out.absolute())


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {file}: {error}") from None
