"""`longtail gain`: what drafting is expected to gain, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli_shared import config_of, errors_told
from services.core.errors import ConfigError


def gain(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a preset.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE|FILE", help="Overrides, or further YAML files.")
    ] = None,
    costs: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A recorded cost table; default: measure this machine.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR|FILE", help="Response lengths: of a run's last step, or numbers.")
    ] = None,
    lognormal: Annotated[str | None, typer.Option(metavar="MEDIAN,SIGMA", help="Response lengths, in tokens.")] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(metavar="P1,P2,...", help="Of each draft position, given those before."),
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Of a mean prompt.")] = None,
    rollout_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of a step's time with OFF: tells the step's speed-up, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead.")] = False,
) -> None:
    """Predict the speed-up of the rollout phase, and which strategy pays at which batch size."""
    with errors_told():
        resolved = config_of(config, settings or [])
        pair = _numbers("--lognormal", lognormal)
        if pair is not None and len(pair) != 2:
            raise ConfigError(f"--lognormal {lognormal}: give two numbers, such as 200,1.0")
        rates = _numbers("--acceptance", acceptance)
        from deploy.gain import Question, answer
        from deploy.gain import as_json as to_json
        from deploy.gain import lines as text_of

        both = (pair[0], pair[1]) if pair else None
        found = answer(resolved, Question(costs, lengths, both, rates, prompt_tokens, rollout_share))
        print(to_json(found) if as_json else "\n".join(text_of(found)))


def bench_gain(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a preset.")] = "pocket-demo",
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE|FILE", help="Overrides, or files.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repeats, after one for warm-up.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts, each group_size times.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """The predicted gain against the achieved and the measured one, on the native engine."""
    with errors_told():
        resolved = config_of(config, settings or [])
        import json

        from deploy.bench_gain import run_bench

        found = run_bench(resolved, repeats, prompts)
        if as_json:
            print(json.dumps(found))


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: give numbers with commas between them, such as 0.8,0.7") from None
