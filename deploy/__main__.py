"""The `longtail` command. Thin: each command reads its arguments, calls one function and prints the answer.

torch, Ray and transformers are imported inside the commands that need them, so that help and mistakes answer at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli_files import add_commands
from deploy.cli_k8s import k8s_app
from deploy.cli_reward import reward_app
from deploy.cli_shared import config_of, errors_told, interrupt_on_sigterm, training_config

app = typer.Typer(
    name="longtail",
    help="Train reasoning models with RL; a drafter for speculative decoding learns in the idle time of the long tail.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Look at prompt sets.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure; the last line of output is JSON.", no_args_is_help=True)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")
app.add_typer(k8s_app, name="k8s")
add_commands(app, bench_app)
app.add_typer(reward_app, name="reward")

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a preset.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE|FILE", help="Overrides such as rollout.group_size=4, or further YAML files."),
]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measured repeats of each cell, after one for warm-up.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]


@app.command()
def train(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a preset.")
    ] = None,
    settings: Settings = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for run folders (run.dir).")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Go on with this run folder or URL.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live display.")] = False,
) -> None:
    """Train a policy and its drafter; writes runs/<id>/ with report.html.

    With run.id=NAME the folder is runs/NAME, and starting the same again goes on from its last checkpoint.
    """
    with errors_told():
        resolved = training_config(config, settings or [], run_dir, resume)
        from deploy.cli_train import train as run

        interrupt_on_sigterm()
        run(resolved, quiet=quiet)


@app.command()
def warmup(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file or preset.")] = "pocket-warmup",
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for target/, drafter/; pocket-warmup has its own.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there.")] = False,
    keep_target: Annotated[bool, typer.Option("--keep-target", help="Only new drafters for the target there.")] = False,
) -> None:
    """Make a small model and its first drafters from nothing, in minutes."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.cli_warmup import make_model

        make_model(resolved, out, overwrite, keep_target)


@app.command()
def grow(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Llama, Qwen2 or Qwen3 model folder.")],
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    hidden_size: Annotated[int, typer.Option(help="Four, 16 ... times the source's keeps bfloat16 exact.")],
    intermediate_size: Annotated[int, typer.Option()],
    num_layers: Annotated[int, typer.Option()],
    num_heads: Annotated[int, typer.Option(help="Query heads; the size of a head stays.")],
    num_kv_heads: Annotated[int, typer.Option()],
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the source's.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="The source's drafter folder, to grow along.")] = None,
    drafter_out: Annotated[Path | None, typer.Option(help="Default: DST/drafter.")] = None,
    noise: Annotated[bool, typer.Option("--noise", help="Unread weights random instead of zero; speed only.")] = False,
    max_positions: Annotated[int | None, typer.Option(help="Room for longer rollouts; default: the source's.")] = None,
) -> None:
    """Make a larger model that computes the same: real acceptance and rewards at the cost of the large shape."""
    with errors_told():
        from deploy.cli_grow import grow_model
        from services.models.grow import GrownShape
        from services.models.grow_files import GrowOptions

        shape = GrownShape(hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads)
        grow_model(source, folder, GrowOptions(shape, dtype, noise, max_positions), drafter, drafter_out)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="A folder under runs/.")]) -> None:
    """Draw report.html again from the files of a run folder."""
    with errors_told():
        from services.report.run_folder import render_report

        print(render_report(run_dir))


@app.command()
def curves(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders under runs/.")],
    out: Annotated[Path, typer.Option(help="Where to write the SVG.")] = Path("curves.svg"),
) -> None:
    """Draw the held-out reward of several runs in one picture."""
    with errors_told():
        from services.report.curves import draw_curves, read_curve

        out.write_text(draw_curves([read_curve(d) for d in run_dirs]), encoding="utf-8")
        print(out)


@app.command()
def page(
    runs_dir: Annotated[Path, typer.Argument(help="The folder that holds run folders (run.dir).")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    address: Annotated[str | None, typer.Option(help="Ray to reach runs at, HOST:PORT; default: as each says.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Take no control requests.")] = False,
    allow_host: Annotated[list[str] | None, typer.Option(help="Further host name that browsers may use.")] = None,
) -> None:
    """Show running and finished runs in the browser; control them with a token."""
    with errors_told():
        from deploy.page import serve_page

        serve_page(runs_dir, host, port, address, read_only, tuple(allow_host or ()))


@app.command()
def monitor(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR|RUNS", help="A run folder, or all in a folder.")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(help="Where Prometheus listens, on 127.0.0.1.", min=1, max=65535)] = 9090,
    interval: Annotated[int, typer.Option(help="Seconds between two scrapes of a run.", min=1)] = 5,
    data: Annotated[Path | None, typer.Option(help="Folder for samples; default: .prometheus beside the runs.")] = None,
    ray_targets: Annotated[
        Path | None,
        typer.Option(help="A Ray cluster's own metrics beside it: its prom_metrics_service_discovery.json."),
    ] = None,
) -> None:
    """Watch runs of this machine with Prometheus (alerts included) until Ctrl-C; needs its package installed."""
    with errors_told():
        from deploy.cli_monitor import data_folder
        from deploy.cli_monitor import monitor as watch
        from deploy.monitoring.prometheus_server import ServerOptions

        interrupt_on_sigterm()
        watch(path, ServerOptions(port, interval, data or data_folder(path), ray_targets))


@data_app.command("check")
def data_check(
    file: Annotated[Path, typer.Argument(help="A JSONL or Parquet prompt set.")],
    config: Annotated[str, typer.Option(help="Whose model, template and limits to check against.")] = "pocket-demo",
    settings: Overrides = None,
    mode: Annotated[str | None, typer.Option(help="strict: any bad row fails; skip: bad rows are left out.")] = None,
) -> None:
    """Name line and reason of every row that a run could not use."""
    with errors_told():
        from deploy.cli_data import check

        check(file, config_of(config, settings or []), mode)


def _end(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))


@bench_app.command("rollout")
def bench_rollout(
    config: Annotated[str, typer.Option(help="Whose model and engine to measure.")] = "pocket-demo",
    settings: Overrides = None,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of transformers' generate, of the engine without speculation, and with each strategy."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_rollout import run_bench

        _end(run_bench(resolved, repeats), as_json)


@bench_app.command("sglang")
def bench_sglang(
    config: Annotated[str, typer.Option(help="Whose model and engine to measure.")] = "reasoner-sglang",
    settings: Overrides = None,
    repeats: Repeats = 5,
    publish: Annotated[bool, typer.Option(help="Also time publishing weights of a 7B shape.")] = True,
    capture: Annotated[bool, typer.Option(help="Also time keeping hidden states.")] = True,
    as_json: AsJson = False,
) -> None:
    """Throughput through the rollout actor against a bare SGLang engine, and how long published weights travel."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_sglang import run_bench

        _end(run_bench(resolved, repeats, publish, capture), as_json)


@bench_app.command("spot")
def bench_spot(
    config: Annotated[str, typer.Option(help="Whose model, prompts and drafter to measure.")] = "pocket-spot",
    settings: Overrides = None,
    repeats: Repeats = 5,
    seeds: Annotated[int, typer.Option(help="Runs that move the policy; 0 leaves the acceptance out.", min=0)] = 3,
    timeline: Annotated[Path | None, typer.Option(help="Draw the slots' roles into this SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Drafter training in idle slots: how much of the idle time it uses, what it costs rollout, how fast it yields."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_spot import run_bench

        _end(run_bench(resolved, repeats, seeds, timeline), as_json)


@bench_app.command("packing")
def bench_packing(
    config: Annotated[str, typer.Option(help="Whose model, prompts and drafter to measure.")] = "pocket-demo",
    settings: Overrides = None,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Drafter training on packed rows against padded ones, on a step's real lengths."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_packing import run_bench

        _end(run_bench(resolved, repeats), as_json)


@bench_app.command("checkpoint")
def bench_checkpoint(
    config: Annotated[str, typer.Option(help="Whose drafter settings to measure with.")] = "pocket-demo",
    settings: Overrides = None,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """How long drafter training stands still for a checkpoint, selective and in the background against full."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_checkpoint import run_bench

        _end(run_bench(resolved, repeats), as_json)


@bench_app.command("losses")
def bench_losses(
    config: Annotated[str, typer.Option(help="Whose model, prompts and drafter to measure.")] = "pocket-demo",
    settings: Overrides = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Training time of each way from each start.")] = 6.0,
    as_json: AsJson = False,
) -> None:
    """Acceptance that each drafter loss reaches in the same time on the same hidden states."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_losses import run_bench

        _end(run_bench(resolved, seconds), as_json)


@bench_app.command("resume")
def bench_resume(
    config: Annotated[str, typer.Option(help="Which run to kill.")] = "pocket-tiny",
    settings: Overrides = None,
    kills: Annotated[int, typer.Option(min=1, help="How often it is killed.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the moments at which it is killed.")] = 0,
    online: Annotated[
        bool, typer.Option("--online", help="The drafter trains: count losses, compare nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """A run killed at random moments and started again, compared bit by bit with one that was left alone."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_resume import run_bench

        _end(run_bench(resolved, kills, seed, online), as_json)


@bench_app.command("tail")
def bench_tail(
    config: Annotated[str, typer.Option(help="Whose model, prompts and servers to measure.")] = "pocket-demo",
    settings: Overrides = None,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Slot seconds freed by moving the last rollouts of a step, and what that does to the rollout time."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_tail import run_bench

        _end(run_bench(resolved, repeats), as_json)


@app.command()
def doctor(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="What is to be run.")] = "pocket-demo",
    settings: Settings = None,
    address: Annotated[str | None, typer.Option(help="Ray to examine (placement.address), HOST:PORT or auto.")] = None,
) -> None:
    """Compare what a run needs with what the machines have; name what is missing."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.cli_doctor import examine

        examine(resolved, address)


@app.command()
def why(
    run: Annotated[str, typer.Argument(metavar="RUN_ID|RUN_DIR", help="A run that is under way.")],
    address: Annotated[str | None, typer.Option(help="Its Ray, HOST:PORT; default: as the run folder says.")] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Also where each process is (py-spy).")] = False,
) -> None:
    """Say what a running run waits for: slots and leases, calls without an answer, versions, pending resources."""
    with errors_told():
        from deploy.cli_why import explain

        explain(run, address, stacks)


@app.command()
def submit(
    config: Config,
    settings: Settings = None,
    address: Annotated[
        str | None, typer.Option(help="The cluster's dashboard, http://HOST:8265; default: RAY_API_SERVER_ADDRESS.")
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="The run's id (run.id): submitting it again is safe.")] = None,
    working_dir: Annotated[Path, typer.Option(help="What is sent: a checkout, or a folder with YAML files.")] = Path(),
    exclude: Annotated[list[str] | None, typer.Option(help="Paths or names to leave out; shell patterns.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment of the job.")] = None,
    wait: Annotated[bool, typer.Option(help="Follow the job's log and return its exit code.")] = True,
) -> None:
    """Run `train` as a job on a Ray cluster; token from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.cli_shared import pairs_of
        from deploy.cli_submit import Submission, submit

        arguments = [config, *(settings or [])]
        submit(
            resolved,
            Submission(arguments, working_dir, address, run_id, pairs_of(env or []), tuple(exclude or ()), wait),
        )


@config_app.command("show")
def config_show(config: Config, settings: Settings = None) -> None:
    """Print the resolved configuration, every default written out."""
    with errors_told():
        from services.config.load import dump_config

        print(dump_config(config_of(config, settings or [])), end="")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        print(f"longtail {installed('longtail-rl')}")
    except PackageNotFoundError:
        print("longtail, run from its source folder and not installed")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
