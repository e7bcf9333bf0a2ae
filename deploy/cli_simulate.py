"""`longtail simulate`: a run on GPUs that are not there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli_shared import config_of, errors_told
from services.core.errors import ConfigError, LongtailError


def simulate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a preset.")] = "reasoner-adaptive",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")] = None,
    gpus: Annotated[str, typer.Option(metavar="N,N,...", help="Sizes of the cluster.")] = "8,64,512",
    shape: Annotated[str, typer.Option(metavar="NAME,...", help="Of the policy: 7b, 32b, 70b.")] = "7b",
    lognormal: Annotated[str, typer.Option(metavar="MEDIAN", help="Of the response lengths, in tokens.")] = "2000",
    sigma: Annotated[str, typer.Option(metavar="S,S,...", help="Tail shapes: of the lengths' logarithm.")] = "1.0",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 16_384,
    rollouts: Annotated[int, typer.Option(min=1, help="Of a slot and step.")] = 64,
    failures: Annotated[str, typer.Option(metavar="R,R,...", help="Of a slot in an hour.")] = "0",
    steps: Annotated[int, typer.Option(min=1, help="Counted steps, after one for warm-up.")] = 3,
    advance_s: Annotated[float, typer.Option(min=0.01, help="How often a server reports.")] = 1.0,
    modes: Annotated[str, typer.Option(metavar="MODE,...", help="off, static, tlt, full.")] = "off,static,full",
    seed: Annotated[int, typer.Option(help="The same seed, the same figures.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write simulation.json and a drawing here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Speed-up, idle time and message load of a cluster by the coordinator's own code under a virtual clock."""
    with errors_told():
        resolved = config_of(config, settings or [])
        import json

        from deploy.simulating import HEAD, Question, answer, as_tree, write

        question = Question(
            gpus=_all("--gpus", gpus, int),
            shapes=tuple(shape.split(",")),
            median=_all("--lognormal", lognormal, float)[0],
            sigmas=_all("--sigma", sigma, float),
            max_tokens=max_tokens,
            rollouts=rollouts,
            failures=_all("--failures", failures, float),
            steps=steps,
            advance_s=advance_s,
            modes=tuple(modes.split(",")),
            seed=seed,
        )
        print(HEAD)
        rows = answer(resolved, question, print)
        if out is not None:
            write(out, question, rows)
        if as_json:
            print(json.dumps(as_tree(question, rows)))


def _all(option: str, text: str, kind: Any) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: give numbers with commas between them") from None


def bench_control(
    slots: Annotated[int, typer.Option(min=2, help="Slots that are not there.")] = 1000,
    config: Annotated[str, typer.Option(help="Whose group size and limits to take.")] = "reasoner-adaptive",
    hosts: Annotated[int, typer.Option(min=1, help="Processes that stand for the slots.")] = 2,
    advance_s: Annotated[float, typer.Option(min=0.05, help="How often a server reports.")] = 1.0,
    reports_per_s: Annotated[float, typer.Option(min=1, help="Of all servers together, at most.")] = 400.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the run.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """The real coordinator over Ray against many slots on this machine: decisions per second, latency, memory."""
    with errors_told():
        resolved = config_of(config, [])
        import json

        from deploy.bench_control import Load, run_bench

        load = Load(slots=slots, hosts=hosts, advance_s=advance_s, reports_per_s=reports_per_s, steps=steps)
        result = run_bench(resolved, load)
        if as_json:
            print(json.dumps(result))


def bench_simulator(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a preset.")] = "pocket-demo",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")] = None,
    servers: Annotated[str, typer.Option(metavar="N,N,...", help="Of the runs to predict.")] = "1,2,4",
    seconds: Annotated[float, typer.Option(min=1, help="Of measuring what rounds cost.")] = 30.0,
    sources: Annotated[
        str | None, typer.Option("--from", metavar="RUN,RUN,...", help="Run folders (off, static) to read costs from.")
    ] = None,
    runs: Annotated[
        str | None, typer.Option(metavar="RUN,RUN,...", help="Run folders to predict, instead of measuring any here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Step times that the simulator predicts against those of real services: run here, in processor time, or, with
    --from and --runs, recorded anywhere."""
    with errors_told():
        import json

        if sources is not None or runs is not None:
            from deploy.bench_recorded import run_recorded

            result = run_recorded(_folders("--from", sources), _folders("--runs", runs))
        else:
            sizes = _all("--servers", servers, int)
            resolved = config_of(config, settings or [])
            from deploy.bench_simulator import run_bench

            result = run_bench(resolved, sizes, seconds)
        if as_json:
            print(json.dumps(result))


def _folders(option: str, text: str | None) -> list[Path]:
    found = [Path(part) for part in (text or "").split(",") if part]
    if not found:
        raise ConfigError(
            f"{option} names no run folder: give --from runs of mode off or static to read costs from, and --runs "
            "runs to predict"
        )
    return found


def bench_e2e(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a preset.")] = "pocket-demo",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")] = None,
    seeds: Annotated[str, typer.Option(metavar="S,S,...", help="One run in each mode for each.")] = "0,1,2",
    modes: Annotated[str | None, typer.Option(metavar="MODE,...", help="off, static, suffix, ema, tlt, full.")] = None,
    static: Annotated[str | None, typer.Option(metavar="NAME", help="Of mode static, instead of trying all.")] = None,
    trial_steps: Annotated[int, typer.Option(min=1, help="Of looking for the best fixed strategy.")] = 2,
    on_ray: Annotated[bool, typer.Option("--ray", help="On Ray, by the clock, also on a CPU.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write steps, run folders and figures here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """One GRPO run in every mode of speculation: seconds of a step, and whether the rewards agree."""
    with errors_told():
        resolved = config_of(config, settings or [])
        numbers = _all("--seeds", seeds, int)
        import json

        from deploy.bench_e2e import Plan, run_bench
        from deploy.e2e_figures import table

        plan = Plan(numbers, tuple(modes.split(",")) if modes else None, static, trial_steps, on_ray, out)
        found = run_bench(resolved, plan, partial(print, flush=True))
        print(table(found))
        if as_json:
            print(json.dumps(found))
        if found["unfinished"]:
            raise LongtailError(f"{len(found['unfinished'])} runs did not come to their end, see above")
