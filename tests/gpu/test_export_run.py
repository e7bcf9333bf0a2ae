"""The drafter that a run has trained, exported, in a stock `sglang.Engine`: how much faster it makes the run's policy.

`LONGTAIL_GPU_RUN_DIR=runs/ID pytest -m gpu tests/gpu/test_export_run.py`, of a run with an EAGLE drafter and a
checkpoint; figures go to results/export_run.json."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.drafter_run import read_run_drafter
from deploy.inputs import load_inputs
from services.config.schema import ClusterConfig
from tests.gpu.stock_engine import acceptance_length, stock_engine

NEEDS_MODEL = False  # for the folder's conftest: the run has one
RUN = os.environ.get("LONGTAIL_GPU_RUN_DIR", "")
pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.skipif(not RUN, reason="LONGTAIL_GPU_RUN_DIR names no run folder"),
]

BATCHES, DEPTHS, REPEATS, MAX_TOKENS, LONGER = (1, 8, 32), (3, 5), 4, 192, 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `drafter` and `policy`."""
    place = tmp_path_factory.mktemp("exported")
    command = ["drafter", "export", RUN, "--out", str(place / "drafter"), "--policy", str(place / "policy")]
    subprocess.run([sys.executable, "-m", "deploy", *command, "--no-measure"], check=True, timeout=200)
    return place


def longest_prompts(config: ClusterConfig, count: int) -> list[list[int]]:
    """Held-out problems with the longest answers: short ones would drain the batch."""
    heldout = load_inputs(config).heldout
    return [list(p.token_ids) for p in sorted(heldout, key=lambda p: -len(p.token_ids))[: LONGER * count]][::LONGER]


def rate(calls: Sequence[Mapping[str, Any]]) -> float:
    """Median tokens per second, without the first call, which warms up."""
    return statistics.median(sum(len(a["ids"]) for a in c["answers"]) / c["seconds"] for c in calls[1:])


def test_speed_of_a_stock_engine_with_the_run_s_drafter(
    exported: Path, save: Callable[[str, dict[str, Any]], None], tmp_path: Path
) -> None:
    found = read_run_drafter(Path(RUN))
    sampling = load_inputs(found.config).sampling
    job = {
        "target": str(exported / "policy"), "drafter": None, "algorithm": "EAGLE", "depth": 0,
        "eos": sampling.stop_token_ids[0], "prompts": longest_prompts(found.config, max(BATCHES)),
        "batches": BATCHES, "repeats": REPEATS, "temperature": sampling.temperature, "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    cells = {0: stock_engine(job, tmp_path)}
    for depth in DEPTHS:
        cells[depth] = stock_engine({**job, "drafter": str(exported / "drafter"), "depth": depth}, tmp_path)
    rows = []
    for at, batch in enumerate(BATCHES):
        off = rate(cells[0][at]["calls"])
        row = {"batch": batch, "off_tokens_per_s": round(off, 1)}
        for depth in DEPTHS:
            calls = cells[depth][at]["calls"]
            length = acceptance_length([a for c in calls[1:] for a in c["answers"]])
            row[f"chain_{depth}"] = {
                "tokens_per_s": round(rate(calls), 1), "speedup": round(rate(calls) / off, 3),
                "acceptance_length": round(length, 3),
            }  # fmt: skip
            assert length > 1.5, "the run's drafter is not what this engine drafts with"
        rows.append(row)
        print(row)
    about = {"policy_version": found.origin.policy_version, "step": found.step, "model": found.config.run.name}
    more = {"sglang": "stock", "temperature": sampling.temperature, "max_tokens": MAX_TOKENS, "repeats": REPEATS - 1}
    save("export_run", about | more | {"rows": rows})
