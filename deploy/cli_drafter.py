"""`longtail drafter`: take a trained drafter out, bring a published one in, compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli_shared import errors_told
from services.core.errors import ConfigError

drafter_app = typer.Typer(help="Export, import and compare drafters.", no_args_is_help=True)
Layout = Annotated[str, typer.Option("--format", help="sglang, speculators (vLLM, EAGLE-3) or hf (vLLM).")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Of a response; default: the run's.")]


@drafter_app.command("export")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    layout: Layout = "sglang",
    step: Annotated[int | None, typer.Option(min=0, help="After which step; default: the last one kept.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Write the policy too, as a model folder.")] = None,
    target: Annotated[str | None, typer.Option(help="Name or path of the policy for engines.")] = None,
    licence: Annotated[str | None, typer.Option(help="For the card, such as apache-2.0.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure acceptance and speed for the card.")] = True,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to measure on.")] = 32,
    max_tokens: MaxTokens = None,
    costs: Annotated[str | None, typer.Option(help="Recorded costs of rounds; default: timed here.")] = None,
) -> None:
    """Write a run's drafter as SGLang, vLLM or the speculators library load it, with a model card."""
    with errors_told():
        from deploy.drafter_export import Destination, Measuring, export_drafter
        from services.drafter.layouts import LAYOUTS

        known = {name: name for name in LAYOUTS}
        if layout not in known:
            raise ConfigError(f"--format {layout} must be one of {', '.join(LAYOUTS)}")
        measuring = Measuring(prompts, max_tokens=max_tokens, costs=costs) if measure else None
        found = export_drafter(run, Destination(known[layout], out, target, policy), step, measuring, licence, _say)
        print(f"{found.method.title} drafter of {found.origin.run}: {out}")
        if policy is not None:
            print(f"policy version {found.origin.policy_version}: {policy}")


@drafter_app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="SpecForge's, speculators' or an export's.")],
    target: Annotated[str, typer.Option(help="The model folder that it drafts for.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Bring a published EAGLE or EAGLE-3 drafter in, for a run to begin with."""
    with errors_told():
        from deploy.drafter_export import import_drafter

        settings = import_drafter(folder, target, out)
        print(f"{out}; begin a run with it: {' '.join(settings)}")


@drafter_app.command("eval")
def evaluate(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Drafter folders, of any layout.")],
    target: Annotated[str, typer.Option(help='The model folder that they draft for, or "pocket".')],
    data: Annotated[str, typer.Option(help="A prompt file, or the held-out ones of a preset.")] = "pocket-demo",
    prompts: Annotated[int, typer.Option(min=1, help="Most prompts.")] = 16,
    siblings: Annotated[int, typer.Option(min=1, help="Responses to each, above temperature 0.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a response.")] = 256,
    running: Annotated[int, typer.Option(min=1, help="Requests at a time while acceptance is counted.")] = 16,
    temperatures: Annotated[str, typer.Option(help="With commas between them.")] = "0,0.6,1",
    batches: Annotated[str, typer.Option(help="Batch sizes of the speed-up.")] = "1,8,32",
    depth: Annotated[int, typer.Option(min=1, max=16, help="Longest chain.")] = 4,
    costs: Annotated[str | None, typer.Option(help="Recorded costs of rounds; default: timed here.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="One yardstick for all methods: estimate.")] = False,
    suffix: Annotated[bool, typer.Option(help="Compare with the suffix index.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw into this SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead.")] = False,
) -> None:
    """Compare drafters: acceptance by position and temperature, expected speed-up by batch size."""
    with errors_told():
        heat = _numbers("--temperatures", temperatures, 0.0)
        sizes = tuple(int(n) for n in _numbers("--batches", batches, 1.0))
        from deploy.drafter_compare import Question, compare, lines, write_plot
        from deploy.drafter_compare import as_json as to_json

        question = Question(
            tuple(folders), target, data, prompts, siblings, max_tokens, running, heat, sizes, depth, costs, offline,
            suffix,
        )  # fmt: skip
        found = compare(question, _say)
        if plot is not None:
            write_plot(found, plot)
        print(to_json(question, found) if as_json else "\n".join(lines(found)))


def _numbers(option: str, text: str, least: float) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        raise ConfigError(f"{option} {text}: give numbers of at least {least:g} with commas between them")
    return tuple(dict.fromkeys(found))


def _say(line: str) -> None:
    from deploy.console import CONSOLE

    CONSOLE.print(line)
