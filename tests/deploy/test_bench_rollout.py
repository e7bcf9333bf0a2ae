"""The bench on the shipped model and drafter, with a workload of moments."""

from __future__ import annotations

import pytest

from deploy.bench_rollout import STRATEGIES, Bench, Workload
from deploy.provenance import ROOT
from services.config.load import load_config


@pytest.fixture(scope="module")
def bench() -> Bench:
    config = load_config("pocket-demo", overrides=["data.source.size=64"], presets_dir=ROOT / "deploy" / "presets")
    return Bench(config)


def test_every_strategy_runs_the_work_and_greedy_output_is_offs(bench: Bench) -> None:
    work = Workload("equal", tuple((p, 2) for p in bench.heldout[:2]), 6)
    for strategy in STRATEGIES:
        run = bench.run_engine(work, strategy, seed=1)
        assert 0 < run.tokens <= 4 * 6
        assert (run.acceptance_length is not None) or strategy.drafter != "eagle"  # a suffix may be found nowhere
    assert bench.run_generate(work, seed=1).tokens <= 4 * 6
    assert bench.greedy_mismatches(work) == 0
