"""`longtail bench graphs`: GPU memory that the captured graphs of an SGLang engine take: of one strategy, of every
strategy for every batch size, and of the pool that an engine with a selector really captures.

Each engine starts alone, one after the other. What is measured is the fall in free GPU memory while graphs and the
buffers of their attention backends are made, kernels that are loaded for the first time among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from deploy.bench_publish import fetch
from deploy.provenance import provenance
from deploy.session import ray_session
from deploy.tailed_server import OURS, TailServer, fixed_config
from services.config.graphs import GraphsConfig
from services.config.schema import ClusterConfig, SGLangEngine
from services.config.speculation import eagle_chain
from services.core.errors import ConfigError
from services.models.files import model_dir, read_grown
from services.rollout.sglang.order import strategies_by_depth

WITHOUT_LIMIT = GraphsConfig(max_nodes=2**30, free_nodes=0, step=1.0, memory_bytes=2**50)


def variants(config: ClusterConfig) -> dict[str, ClusterConfig]:
    """One strategy (the deepest), the naive set, the pool."""
    engine, strategies = config.rollout.engine, strategies_by_depth(config.speculation)
    if not isinstance(engine, SGLangEngine) or len(strategies) < 2:
        raise ConfigError("bench graphs needs an SGLang engine whose selector has several EAGLE chains")
    deepest = strategies[max(strategies)]
    naive = engine.model_copy(update={"graphs": WITHOUT_LIMIT})
    rollout = config.rollout.model_copy(update={"engine": naive})
    return {
        "one_strategy": fixed_config(config, eagle_chain(deepest.depth, deepest.sampled)),
        "naive": config.model_copy(update={"rollout": rollout}),
        "pool": config,
    }


def run_bench(config: ClusterConfig) -> dict[str, Any]:
    chosen = variants(config)
    with ray_session(config):
        parts = {name: _graphs_of(one) for name, one in chosen.items()}
    result = {
        "bench": "graphs",
        "provenance": provenance(),
        "grown": read_grown(model_dir(config.model.path)),
        **summary(parts),
    }
    print(table(result), flush=True)
    return result


def _graphs_of(config: ClusterConfig) -> list[dict[str, Any]]:
    server = ray.remote(TailServer).options(num_gpus=1, num_cpus=1).remote(config, OURS)
    try:
        timeout_s = config.coordinator.start_timeout_s
        fetch([server.ready.remote()], timeout_s, "the engine to start")
        found: list[dict[str, Any]] = fetch(server.graphs.remote(), timeout_s, "the memory of its graphs")
        return found
    finally:
        ray.kill(server)


def summary(parts: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """`ratio`: the pool's memory over one strategy's."""
    total = {name: sum(g["device_bytes"] for g in found) for name, found in parts.items()}
    one = max(1, total["one_strategy"])
    return {
        "bytes": total,
        "ratio": round(total["pool"] / one, 3),
        "naive_ratio": round(total["naive"] / one, 3),
        "parts": dict(parts),
    }


def table(result: Mapping[str, Any]) -> str:
    lines = [f"{'graphs of':15}{'depth':>6}{'up to':>7}{'sizes':>7}{'MiB':>9}{'seconds':>9}"]
    for name, found in result["parts"].items():
        for g in found:
            mib = g["device_bytes"] / 2**20
            lines.append(f"{name:15}{g['depth']:6}{g['largest']:7}{g['count']:7}{mib:9.0f}{g['seconds']:9.1f}")
        lines.append(f"{name:15}{'all':>6}{'':14}{result['bytes'][name] / 2**20:9.0f}")
    lines.append(f"pool / one strategy: {result['ratio']:.2f}; naive / one strategy: {result['naive_ratio']:.2f}")
    return "\n".join(lines)
