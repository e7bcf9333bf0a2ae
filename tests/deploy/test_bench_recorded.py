"""`longtail bench simulator --from RUNS --runs RUNS`, on run folders of a world that is not there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deploy.__main__ import app
from deploy.bench_recorded import run_recorded
from tests.services.simulator.worlds import chain_of, known_world, lockstep_cluster, record


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    wanted = {
        "off": lockstep_cluster(),
        "static": chain_of(3),
        "off-2": lockstep_cluster(2),
        "full": lockstep_cluster(mode="full"),
    }
    return {name: record(wanted[name], known_world(), place / name) for name in wanted}


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "simulator", *arguments])


def paths(folders: dict[str, Path], names: Sequence[str]) -> str:
    return ",".join(str(folders[name]) for name in names)


def test_recorded_runs_are_predicted_from_recorded_runs(folders: dict[str, Path]) -> None:
    done = bench(
        "--from", paths(folders, ["off", "static"]), "--runs", paths(folders, ["static", "off-2", "full"]), "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(r["mode"], r["servers"], r["fitted"]) for r in found["runs"]] == [
        ("eagle_3_1_4", 1, True), ("off", 2, False), ("adaptive", 1, False)
    ]  # fmt: skip
    assert found["runs"][2]["cost_error"] is None and abs(found["runs"][1]["cost_error"]) < 0.05
    assert [r["steps"] for r in found["runs"]] == [3, 3, 3] and len(found["rows"]) == 12
    assert abs(found["runs"][1]["rollout_error"]) < 0.05 and abs(found["runs"][1]["step_error"]) < 0.05
    assert {p["strategy"] for p in found["points"]} == {"off", "eagle_3_1_4"}
    predicted = [abs(r["step_error"]) for r in found["rows"] if not r["fitted"] and r["step"] > 1]
    assert found["step_error_worst"] == max(predicted), "errors of what was fitted are no predictions"
    lines = done.stdout.splitlines()
    assert "of 6 of 6 servers' steps" in lines[0]
    assert any(line.endswith(f"{folders['static']}, fitted") for line in lines)
    assert any(line.endswith(str(folders["off-2"])) for line in lines)


def test_a_run_counts_once_whatever_it_is_called(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders["off"].parent)
    found = run_recorded([Path("off"), folders["off"]], [folders["off"]], lambda line: None)
    assert [(r["run"], r["fitted"]) for r in found["runs"]] == [(found["from"][0], True)]


def test_more_requests_at_once_than_were_seen_are_told(folders: dict[str, Path]) -> None:
    told = list[str]()
    run_recorded([folders["off"]], [folders["off-2"]], told.append)
    assert not [line for line in told if "is a guess" in line]
    small = record(lockstep_cluster(groups=4), known_world(), folders["off"].parent / "small")
    run_recorded([small], [folders["off"]], told.append)
    assert [line.partition(": ")[2] for line in told if "is a guess" in line] == ["name a run with as many in --from"]


def test_one_option_without_the_other_is_refused(folders: dict[str, Path]) -> None:
    done = bench("--from", str(folders["off"]))
    assert done.exit_code == 2 and "--runs names no run folder: give --from runs of mode off or static" in done.stderr
    done = bench("--runs", str(folders["off"]))
    assert done.exit_code == 2 and "--from names no run folder" in done.stderr


def test_what_cannot_be_used_is_told_with_its_remedy(folders: dict[str, Path], tmp_path: Path) -> None:
    done = bench("--from", str(folders["full"]), "--runs", str(folders["off"]))
    assert done.exit_code == 2 and "its rounds have no one cost: give it to --runs" in " ".join(done.stderr.split())
    done = bench("--from", str(folders["off"]), "--runs", str(tmp_path))
    assert done.exit_code == 2 and "is no run folder" in done.stderr
