"""`longtail bench e2e` on Ray: one run after the other, and nothing of one is left when the next one begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.bench_e2e import Plan, run_bench
from deploy.e2e_runs import STEPS_FILE
from deploy.processes import descendants
from services.report.run_data import load_run
from tests.deploy.tiny_run import make_model_folder, tiny_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def test_two_modes_by_the_clock(tmp_path: Path) -> None:
    run = {"steps": 2, "eval_prompts": 0, "compare_prompts": 0}
    config, before = tiny_run(make_model_folder(tmp_path), tmp_path, run=run), descendants()
    left = list[bool]()

    def say(line: str) -> None:
        if line.startswith("seed") and "a step" in line:  # a run is over
            left.append(any(p.is_running() for p in descendants() if p not in before))

    found = run_bench(config, Plan((0,), ("off", "static"), "eagle_2_1_3", on_ray=True, out=tmp_path / "out"), say)
    assert left == [False, False]
    assert found["clock"] == "wall clock" and found["unfinished"] == [] and set(found["speedup"]) == {"off", "static"}
    assert found["modes"]["static"]["acceptance_length"] > 1
    assert found["modes"]["static"]["wall_s"] >= 0.9 * found["step_s"]["static"]
    rows = [json.loads(line) for line in (tmp_path / "out" / STEPS_FILE).read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if "step" in row]
    about = json.loads((tmp_path / "out" / "runs" / "static-0" / "run.json").read_text())
    assert about["run_id"] == "static-0" and about["starts"][-1]["ray"]["address"]
    assert len(load_run(tmp_path / "out" / "runs" / "static-0").tails) == 2
    assert len(seconds) == 4 and any(found.get("longtail_publish_seconds|policy", 0) > 0 for found in seconds)
