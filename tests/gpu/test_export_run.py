"""The drafter that a run has trained, exported, in a stock `sglang.Engine`: accepted as often as in the run, and by how
much it makes the run's policy faster.

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

from deploy.drafter_run import RunDrafter, read_run_drafter
from deploy.inputs import load_inputs
from services.config.speculation import FixedSelector
from services.coordinator.services import Inputs
from services.core.types import Prompt, SamplingParams
from services.report.history import METRICS
from services.report.records import read_lines
from tests.gpu.stock_engine import acceptance_length, stock_engine

NEEDS_MODEL = False  # for the folder's conftest: the run has one
RUN = os.environ.get("LONGTAIL_GPU_RUN_DIR", "")
pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.skipif(not RUN, reason="LONGTAIL_GPU_RUN_DIR names no run folder"),
]

BATCHES, DEPTHS, REPEATS, MAX_TOKENS, LONGER = (1, 8, 32), (3, 5), 4, 192, 4
LAST_STEPS, AGREE_ON, CLOSE = 4, 512, 0.02


@pytest.fixture(scope="module")
def found() -> RunDrafter:
    return read_run_drafter(Path(RUN))


@pytest.fixture(scope="module")
def inputs(found: RunDrafter) -> Inputs:
    return load_inputs(found.config)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `drafter` and `policy`."""
    place = tmp_path_factory.mktemp("exported")
    command = ["drafter", "export", RUN, "--out", str(place / "drafter"), "--policy", str(place / "policy")]
    subprocess.run([sys.executable, "-m", "deploy", *command, "--no-measure"], check=True, timeout=200)
    return place


def longest_prompts(heldout: Sequence[Prompt], count: int) -> list[list[int]]:
    """Problems with the longest answers: short ones would drain the batch."""
    return [list(p.token_ids) for p in sorted(heldout, key=lambda p: -len(p.token_ids))[: LONGER * count]][::LONGER]


def rate(calls: Sequence[Mapping[str, Any]]) -> float:
    """Median tokens per second, without the first call, which warms up."""
    return statistics.median(sum(len(a["ids"]) for a in c["answers"]) / c["seconds"] for c in calls[1:])


def job_of(exported: Path, sampling: SamplingParams, **more: Any) -> dict[str, Any]:
    """Without a drafter."""
    return {
        "target": str(exported / "policy"), "drafter": None, "algorithm": "EAGLE", "depth": 0,
        "eos": sampling.stop_token_ids[0], "temperature": sampling.temperature, **more,
    }  # fmt: skip


def test_a_stock_engine_accepts_as_often_as_the_run_did(
    exported: Path, found: RunDrafter, inputs: Inputs, save: Callable[[str, dict[str, Any]], None], tmp_path: Path
) -> None:
    """On problems like those of the run's last steps, which it has not seen."""
    strategy = found.config.speculation.selector
    if not isinstance(strategy, FixedSelector) or not strategy.strategy.learned:
        pytest.skip("the run changed its strategies: its acceptance length is no chain's")
    chain, prompts = strategy.strategy, [list(p.token_ids) for p in inputs.heldout[:AGREE_ON]]
    job = job_of(
        exported, inputs.sampling, prompts=prompts, batches=[len(prompts)], repeats=1,
        max_tokens=inputs.sampling.max_tokens,
    )  # fmt: skip
    ((call,),) = (
        cell["calls"]
        for cell in stock_engine({**job, "drafter": str(exported / "drafter"), "depth": chain.depth}, tmp_path)
    )
    steps = [row for row in read_lines(Path(RUN) / METRICS)[0] if row["kind"] == "step"]
    wanted = statistics.fmean(row["acceptance_length"] for row in steps[-LAST_STEPS:])
    length = acceptance_length(call["answers"])
    record = {"chain": chain.depth, "prompts": len(prompts), "stock": round(length, 4), "the run's": round(wanted, 4)}
    save("export_run_acceptance", record)
    assert length == pytest.approx(wanted, rel=CLOSE), record


def test_speed_of_a_stock_engine_with_the_run_s_drafter(
    exported: Path, found: RunDrafter, inputs: Inputs, save: Callable[[str, dict[str, Any]], None], tmp_path: Path
) -> None:
    prompts = longest_prompts(inputs.heldout, max(BATCHES))
    job = job_of(exported, inputs.sampling, prompts=prompts, batches=BATCHES, repeats=REPEATS, max_tokens=MAX_TOKENS)
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
    more = {"sglang": "stock", "temperature": job["temperature"], "max_tokens": MAX_TOKENS, "repeats": REPEATS - 1}
    save("export_run", about | more | {"rows": rows})
