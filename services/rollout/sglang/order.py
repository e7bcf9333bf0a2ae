"""What an engine with several strategies is told at its start: a JSON text that SGLang 0.5.17 reads as the
configuration of its own adaptive depth (keys are batch sizes) and the plug-in as its order (the key "longtail").

SGLang reads it from a file in every one of its processes, also to size what must hold the deepest chain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from services.config.schema import ClusterConfig, SGLangEngine
from services.config.speculation import SpeculationConfig
from services.rollout.sglang.graphs import GraphPool
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

KEY = "longtail"
CONFIG_FILE = "speculative_adaptive_config"  # SGLang's argument: where the text lies


def strategies_by_depth(config: SpeculationConfig) -> dict[int, DraftStrategy]:
    """What an engine with one drafter can switch between, OFF always among it. One entry: it never switches."""
    chosen = {s.depth: s for s in map(draft_strategy, config.strategies)}
    return chosen if len(chosen) == 1 else {0: OFF} | chosen


@dataclass(frozen=True)
class SwitchOrder:
    """`speculation`: the section of the configuration, with the selector; `seed`: of the selector's random numbers."""

    pool: GraphPool
    speculation: Mapping[str, Any]
    seed: str
    server: str = field(default="rollout-0", kw_only=True)

    @property
    def strategies(self) -> dict[int, DraftStrategy]:
        return strategies_by_depth(self.config)

    @property
    def config(self) -> SpeculationConfig:
        return SpeculationConfig.model_validate(self.speculation)

    def text(self) -> str:
        steps = {"1": {"candidate_steps": sorted(self.pool.depths)}}
        return json.dumps({**steps, KEY: asdict(self)})


def parse_order(text: str) -> SwitchOrder | None:
    """None for a configuration of SGLang's own adaptive depth."""
    told = json.loads(text).get(KEY)
    if told is None:
        return None
    pool = told["pool"] | {"depths": tuple(told["pool"]["depths"])}
    return SwitchOrder(GraphPool(**pool), told["speculation"], told["seed"], server=told["server"])


@cache
def read_order(path: str | None) -> SwitchOrder | None:
    """Of one of SGLang's processes, from the argument it was started with; None when it does not switch for us."""
    return None if path is None else parse_order(Path(path).read_text())


def switch_order(config: ClusterConfig, engine: SGLangEngine, slot: int) -> SwitchOrder | None:
    """None for an engine that keeps one strategy."""
    depths = tuple(sorted(strategies_by_depth(config.speculation)))
    if len(depths) == 1:
        return None
    graphs = engine.graphs
    pool = GraphPool(depths, engine.max_running, graphs.max_nodes, graphs.free_nodes, graphs.step, graphs.memory_bytes)
    seed = f"{config.run.seed}/selector/{slot}"
    return SwitchOrder(pool, config.speculation.model_dump(mode="json"), seed, server=f"rollout-{slot}")
