"""The order to switch: what the configuration means, and that both readers of the text find theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config.load import load_config
from services.config.schema import ClusterConfig, SGLangEngine
from services.rollout.sglang.order import parse_order, read_order, strategies_by_depth, switch_order
from services.speculation.strategy import OFF
from tests.services.rollout.engines import strategy

CHAIN_3 = "{drafter: eagle, depth: 3, num_draft_tokens: 4}"
SEVERAL = (
    "speculation.selector={type: beg_mab, buckets: [{strategies: [{drafter: eagle, depth: 5, "
    "num_draft_tokens: 6}, " + CHAIN_3 + "]}, {min_running: 9, strategies: [" + CHAIN_3 + "]}]}"
)
SGLANG = ("rollout.engine={type: sglang, max_running: 40, graphs: {max_nodes: 96}}", "placement.mode=local")


def config_of(*overrides: str) -> tuple[ClusterConfig, SGLangEngine]:
    config = load_config(overrides=(*SGLANG, "run.seed=4", *overrides))
    assert isinstance(config.rollout.engine, SGLangEngine)
    return config, config.rollout.engine


def test_off_is_among_several_whether_named_or_not_and_each_depth_is_there_once() -> None:
    config, _ = config_of(SEVERAL)
    assert strategies_by_depth(config.speculation) == {0: OFF, 3: strategy("eagle", 3), 5: strategy("eagle", 5)}


@pytest.mark.parametrize("chosen", ["{}", CHAIN_3, "{drafter: ngram, depth: 2, topk: 3, num_draft_tokens: 7}"])
def test_one_strategy_is_no_order(chosen: str) -> None:
    config, engine = config_of(f"speculation.selector={{type: fixed, strategy: {chosen}}}")
    assert len(strategies_by_depth(config.speculation)) == 1 and switch_order(config, engine, 0) is None


def test_the_text_tells_sglang_its_depths_and_the_plugin_everything(tmp_path: Path) -> None:
    config, engine = config_of(SEVERAL)
    order = switch_order(config, engine, 3)
    assert order is not None and order.server == "rollout-3" and order.config == config.speculation
    steps = {key: entry for key, entry in json.loads(order.text()).items() if key.isdigit()}
    assert steps == {"1": {"candidate_steps": [0, 3, 5]}}, "every size of buffers follows from these"
    assert parse_order(order.text()) == order
    file = tmp_path / "order.json"
    file.write_text(order.text())
    assert read_order(str(file)) == order
    file.unlink()
    assert read_order(str(file)) == order, "read once in a process"
    assert order.pool.largest(5) == 16 and order.pool.largest(0) == 40
    other = switch_order(config, engine, 4)
    assert other is not None and other.seed != order.seed, "servers explore apart"


def test_a_file_of_sglangs_own_is_no_order(tmp_path: Path) -> None:
    file = tmp_path / "stock.json"
    file.write_text('{"1": {"candidate_steps": [1, 3, 7]}, "ema_alpha": 0.2}')
    assert read_order(str(file)) is None and read_order(None) is None
