"""The commands that have a file of their own, put into the program."""

from __future__ import annotations

import typer

from deploy.cli_bench_gpu import bench_graphs, bench_tailed
from deploy.cli_bench_serve import bench_serve
from deploy.cli_costs import add_benches
from deploy.cli_drafter import drafter_app
from deploy.cli_engine import bench_acceptance, bench_rounds, bench_switch
from deploy.cli_explain import explain
from deploy.cli_gain import bench_gain, gain
from deploy.cli_model import model_app
from deploy.cli_policy import bench_policy
from deploy.cli_serve import serve
from deploy.cli_simulate import bench_control, bench_e2e, bench_simulator, simulate
from deploy.cli_trl import bench_trl


def add_commands(app: typer.Typer, bench: typer.Typer) -> None:
    """`bench`: the group of those that measure."""
    app.add_typer(drafter_app, name="drafter")
    app.command()(explain)
    app.command()(gain)
    app.add_typer(model_app, name="model")
    app.command()(simulate)
    app.command()(serve)
    add_benches(bench)
    bench.command("gain")(bench_gain)
    bench.command("control")(bench_control)
    bench.command("e2e")(bench_e2e)
    bench.command("policy")(bench_policy)
    bench.command("simulator")(bench_simulator)
    bench.command("tailed")(bench_tailed)
    bench.command("graphs")(bench_graphs)
    bench.command("acceptance")(bench_acceptance)
    bench.command("switch")(bench_switch)
    bench.command("rounds")(bench_rounds)
    bench.command("trl")(bench_trl)
    bench.command("serve")(bench_serve)
