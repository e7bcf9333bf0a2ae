"""The engines that `longtail bench tailed` compares, each in an actor of its own on the same GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from deploy.tailed_runs import SwitchStall, TailRun, run_tail, switch_stall
from services.config.schema import ClusterConfig, SGLangEngine
from services.config.speculation import FixedSelector, StrategyConfig, eagle_chain
from services.core.errors import ConfigError
from services.core.types import GroupWork
from services.rollout.sglang.build import build_sglang_engine, start_sglang
from services.rollout.sglang.graphs import CapturedGraphs
from services.rollout.sglang.handle import EngineHandle
from services.rollout.sglang.order import strategies_by_depth

STOCK, OURS = "sglang_adaptive", "ours"
STOCK_DEPTH = 7  # the deepest of SGLang's own candidates: with a shallower first one, its logits buffer is too small
FIXED = 3  # chains, at most


def mode_configs(config: ClusterConfig) -> dict[str, ClusterConfig]:
    """OFF, the chains among the selector's strategies, SGLang's own adaptive depth, and the selector. SGLang's own
    drafts argmax tokens: at a batch size where it turns drafting off, 0.5.17 fails with sampled ones."""
    strategies = strategies_by_depth(config.speculation)
    if len(strategies) < 2 or not isinstance(config.rollout.engine, SGLangEngine):
        raise ConfigError(
            "bench tailed compares strategies of an SGLang engine: give it a configuration whose selector has several "
            "EAGLE chains, for instance --set speculation.selector='{type: adaptive, strategies: [...]}'"
        )
    sampled = strategies[max(strategies)].sampled
    depths = [d for d in sorted(strategies) if d][-FIXED:]
    modes = {"off": fixed_config(config, StrategyConfig())}
    modes |= {strategies[d].name: fixed_config(config, eagle_chain(d, sampled)) for d in depths}
    return modes | {STOCK: fixed_config(config, eagle_chain(STOCK_DEPTH, False)), OURS: config}


def fixed_config(config: ClusterConfig, strategy: StrategyConfig) -> ClusterConfig:
    """The same engine with one strategy."""
    speculation = config.speculation.model_copy(update={"selector": FixedSelector(strategy=strategy)})
    return config.model_copy(update={"speculation": speculation})


def mode_arguments(mode: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Responses end where they are told to, so that all modes generate the same lengths."""
    own = {"speculative_adaptive": True} if mode == STOCK else {}
    return {**arguments, **own, "preferred_sampling_params": json.dumps({"ignore_eos": True})}


class TailServer:
    def __init__(self, config: ClusterConfig, mode: str) -> None:
        engine = config.rollout.engine
        assert isinstance(engine, SGLangEngine)
        self._handle: EngineHandle | None = None
        self._strategies = strategies_by_depth(config.speculation)
        self._engine = build_sglang_engine(config, engine, 0, partial(self._start, mode))

    def _start(self, mode: str, arguments: Mapping[str, Any], server: str, config: ClusterConfig) -> EngineHandle:
        self._handle = start_sglang(mode_arguments(mode, arguments), f"{server} ({mode})", config)
        return self._handle

    def ready(self) -> None: ...

    def run(self, work: Sequence[GroupWork]) -> TailRun:
        return run_tail(self._engine, work, time.monotonic)

    def stall(self, contexts: Sequence[Sequence[int]]) -> SwitchStall:
        deepest = self._strategies[max(self._strategies)]
        return switch_stall(self._engine, contexts, (self._strategies[0], deepest), time.monotonic)

    def graphs(self) -> list[dict[str, Any]]:
        from services.rollout.sglang.launch import SGLangHandle

        assert isinstance(self._handle, SGLangHandle)
        return [asdict(g) for g in sorted(self._handle.graphs(), key=_depth)]


def _depth(graphs: CapturedGraphs) -> int:
    return graphs.depth
