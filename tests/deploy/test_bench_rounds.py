"""The bench on the shipped model and drafter, for moments."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from deploy.bench_rounds import Cell, parse_cells, processor_seconds, run_bench
from deploy.provenance import ROOT
from services.config.load import load_config
from services.core.errors import ConfigError


def config_of(*overrides: str) -> Any:
    own = ("placement.mode=local", "data.source.size=64", *overrides)
    return load_config("pocket-demo", overrides=own, presets_dir=ROOT / "deploy" / "presets")


def test_every_strategy_of_the_run_in_every_cell() -> None:
    cells, said = (Cell(1, 40), Cell(3, 24)), list[str]()
    config = config_of()
    result = run_bench(config, cells, 16, 0.01, said.append)
    rows = result["rows"]
    names = [r["strategy"] for r in rows if (r["running"], r["context"]) == (3, 24)]
    assert names[0] == "off" and len(names) == len(set(names)) > 2 and len(rows) == 2 * len(names) == len(said)
    for row in rows:
        assert row["rounds"] > 0 and row["ms"] > 0 and row["processor_ms"] >= 0
        length = row["acceptance_length"]
        assert length is None if row["strategy"] == "off" else length >= 1
        made = row["running"] * (length or 1.0) * row["rounds"]
        assert row["tokens_per_s"] <= 1.01 * made / (row["ms"] * row["rounds"] / 1000) + 1
    assert result["engine"] == "native" and result["attention"] is None


def test_processor_time_is_told_by_process() -> None:
    """An engine's scheduler is a process of its own, which computes while this one waits."""
    before = processor_seconds()
    work = "import time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = processor_seconds()
        child.kill()
    grown = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    assert max(grown, key=lambda pid: grown[pid]) == child.pid and 0.5 < grown[child.pid] < 2.0
    assert os.getpid() in grown


@pytest.mark.parametrize("text", ["", "5", "1x", "ax5", "0x5", "1x2x3", "1x5,,2x4"])
def test_cells_that_are_none_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--cells"):
        parse_cells(text)


def test_cells_beyond_the_engine_are_refused_before_it_starts() -> None:
    assert parse_cells("2x700") == (Cell(2, 700),)
    for text in ("1000x8", "1x100000"):
        with pytest.raises(ConfigError, match="name smaller cells"):
            run_bench(config_of(), parse_cells(text), 16, 0.01)


def test_contexts_longer_than_any_response_are_told() -> None:
    with pytest.raises(ConfigError, match="name shorter cells"):
        run_bench(config_of(), (Cell(1, 700),), 16, 0.01)
