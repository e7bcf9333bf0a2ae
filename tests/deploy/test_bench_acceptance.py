"""Acceptance cells: the arithmetic, and all strategies on the shipped model with a workload of moments."""

from __future__ import annotations

import dataclasses

import pytest

from deploy.bench_acceptance import EPOCHS, STRATEGIES, measure, run_bench, table
from deploy.bench_rollout import Bench
from deploy.provenance import ROOT
from services.config.load import load_config
from services.core.errors import ConfigError


def config_of(*overrides: str):
    presets = ROOT / "deploy" / "presets"
    return load_config("pocket-demo", overrides=["data.source.size=64", *overrides], presets_dir=presets)


def test_every_strategy_has_a_cell_per_epoch_and_greedy_ones_agree() -> None:
    bench = Bench(config_of())
    cells = [c for s in STRATEGIES for c in measure(bench, s, bench.heldout[:2], (2, 4, 10), 0.0)]
    assert [(c.strategy, c.epoch) for c in cells] == [(s.name, e + 1) for s in STRATEGIES for e in range(EPOCHS)]
    assert len({c.tokens for c in cells}) == 1, "greedy responses are the same whatever drafts"
    by = {(c.strategy, c.epoch): c for c in cells}
    off, suffix = by["off", 1], by["suffix_8_1_9", 2]
    assert off.acceptance_length is None and off.tokens_per_step == 1 and off.acceptance_rate is None
    assert suffix.acceptance_length is not None and suffix.acceptance_length > 3, "it knows the first epoch's responses"
    assert suffix.tokens_per_step <= suffix.acceptance_length
    lines = table(0.0, cells).splitlines()
    assert len(lines) == 1 + len(STRATEGIES) and lines[1].startswith("off")


def test_another_engine_is_refused() -> None:
    config = config_of()
    other = dataclasses.make_dataclass("Other", ["type"])("sglang")
    engine = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": other})})
    with pytest.raises(ConfigError, match="native"):
        run_bench(engine, 1, 1, 1)
