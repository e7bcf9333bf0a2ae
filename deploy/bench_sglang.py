"""`longtail bench sglang`: what the rollout server costs on top of a bare SGLang engine, and how long versions travel.

Throughput: the same prompts, greedy, through the rollout actor and through a bare `sglang.Engine` with the very same
arguments in another actor on the same GPU; one after the other within every repeat, in turns first, the first repeat
dropped. `ratio` is the median of the repeats' own ratios. Capture: the rollout actor alone, with and without hidden
states kept for the drafter, in turns; handing the states over is timed by itself. Every repeat has prompts that no
cache has seen. A small model is bound by the CPU that launches its kernels, and all these figures with it: `longtail
grow` one. Publishing: see `bench_publish`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

import ray

from actors.rollout import RolloutActor
from deploy.bench_publish import EPOCH, STORE_7B, fetch, publish_figures
from deploy.inputs import load_inputs
from deploy.provenance import provenance
from deploy.session import ray_session
from services.config.schema import ClusterConfig, SGLangEngine
from services.core.errors import ConfigError
from services.core.types import GroupWork, Prompt, SamplingParams
from services.drafter.state import read_drafter
from services.models.files import model_dir, read_config, read_grown, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_folder, drafter_method
from services.models.target import target_names
from services.rollout.sglang.arguments import sampling_arguments
from services.rollout.sglang.build import slot_arguments
from services.rollout.sglang.start import start_engine

BATCHES = (1, 8, 32, 64)
CAPTURE_BATCHES = (8, 32, 64)


class BareEngine:
    """The baseline: nothing but SGLang's own blocking `generate`."""

    def __init__(self, config: ClusterConfig) -> None:
        engine = config.rollout.engine
        assert isinstance(engine, SGLangEngine)
        timeout_s = config.coordinator.start_timeout_s
        self._engine = start_engine(slot_arguments(config, engine, 0), "bare engine", timeout_s)

    def ready(self) -> None: ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> tuple[int, float]:
        """(tokens, seconds), with the logprobs that training needs."""
        arguments = sampling_arguments(sampling, seed=0, deterministic=False)
        started = time.monotonic()
        ids = [list(p) for p in prompts]
        out = self._engine.generate(input_ids=ids, sampling_params=arguments, return_logprob=True)
        return sum(len(o["output_ids"]) for o in out), time.monotonic() - started


def run_bench(config: ClusterConfig, repeats: int, publishing: bool, capturing: bool) -> dict[str, Any]:
    """Prints a table; returns cells, their smallest ratio, what keeping hidden states costs and the publishing
    figures."""
    if not isinstance(config.rollout.engine, SGLangEngine):
        raise ConfigError("bench sglang needs a configuration with rollout.engine.type: sglang")
    if publishing and config.placement.object_store_bytes < STORE_7B:
        raise ConfigError(
            f"weights of a 7B shape pass through the object store: set placement.object_store_bytes to {STORE_7B}, or "
            "leave them out with --no-publish"
        )
    with ray_session(config):
        cells, capture = _throughput(config, repeats, capturing)
        publish = publish_figures(config, repeats) if publishing else None
    return {
        "bench": "sglang",
        "provenance": provenance(),
        "grown": read_grown(model_dir(config.model.path)),
        "seed": config.run.seed,
        "strategies": [s.model_dump() for s in config.speculation.strategies],
        "max_tokens": config.rollout.sampling.max_tokens,
        "repeats": repeats,
        "cells": cells,
        "actor_vs_bare_min": min(cell["ratio"] for cell in cells),
        "capture": capture,
        "publish": publish,
    }


def _throughput(
    config: ClusterConfig, repeats: int, capturing: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(rollout server against bare engine, with against without capture). None without an EAGLE drafter too."""
    inputs = load_inputs(config)
    share = config.placement.gpus_per_slot
    eagle = any(s.drafter == "eagle" for s in config.speculation.strategies) and config.drafter.method == "eagle"
    captures = capturing and eagle
    changed = config.drafter.model_copy(update={"states": "engine" if captures else "policy"})
    config = config.model_copy(update={"drafter": changed})
    server = ray.remote(RolloutActor).options(num_gpus=share).remote(config, 0)
    bare = ray.remote(BareEngine).options(num_gpus=share).remote(config)
    try:
        wait_s = config.coordinator.start_timeout_s
        fetch([server.process_id.remote(), bare.ready.remote()], wait_s, "both engines to start")
        _load_from_disk(server, config)
        sampling = replace(inputs.sampling, temperature=0.0, stop_strings=())
        unseen = iter(inputs.train)
        cells = []
        for batch in BATCHES:
            cells.append(_cell(server, bare, _batches(unseen, batch, repeats), sampling, config))
            print(json.dumps(cells[-1]), flush=True)
        if not captures:
            return cells, None
        capture = []
        for batch in CAPTURE_BATCHES:
            capture.append(_capture_cell(server, _batches(unseen, batch, repeats), sampling, config))
            print(json.dumps({"capture": capture[-1]}), flush=True)
        return cells, capture
    finally:
        for actor in (server, bare):
            ray.kill(actor)


def _batches(unseen: Iterator[Prompt], batch: int, repeats: int) -> list[list[Prompt]]:
    """Prompts of every repeat and of the one that is dropped."""
    batches = [list(islice(unseen, batch)) for _ in range(repeats + 1)]
    if len(batches[-1]) < batch:
        raise ConfigError("too few prompts for so many repeats: raise data.source.size")
    return batches


def _load_from_disk(server: Any, config: ClusterConfig) -> None:
    folder, timeout_s = model_dir(config.model.path), config.coordinator.call_timeout_s
    spec = model_spec(read_config(folder))
    tensors = read_tensors(folder)
    policy = ray.put({name: tensors[name] for name in target_names(spec)})
    fetch(server.open_epoch.remote(EPOCH), timeout_s, "the epoch")
    fetch(server.load_policy.remote(0, policy, EPOCH), timeout_s, "the policy load")
    if any(s.drafter == "eagle" for s in config.speculation.strategies):
        method = drafter_method(config.drafter, spec)
        drafter = read_drafter(drafter_folder(config), method)
        fetch(server.load_drafter.remote(0, drafter, EPOCH), timeout_s, "the drafter load")


def _cell(
    server: Any, bare: Any, batches: Sequence[Sequence[Prompt]], sampling: SamplingParams, config: ClusterConfig
) -> dict[str, Any]:
    """Tokens per second on both sides, medians and extremes over the repeats."""
    timeout_s = config.coordinator.call_timeout_s
    rates: dict[str, list[float]] = {"actor": [], "bare": []}
    length, seconds = None, 0.0
    for repeat, prompts in enumerate(batches):
        ids = [p.token_ids for p in prompts]
        for side in ("actor", "bare") if repeat % 2 else ("bare", "actor"):
            if side == "actor":
                tokens, seconds, length = _through_actor(server, prompts, sampling, repeat, config)
            else:
                tokens, seconds = fetch(bare.generate.remote(ids, sampling), timeout_s, "the bare engine")
            if repeat:
                rates[side].append(tokens / seconds)
    ratios = [a / b for a, b in zip(rates["actor"], rates["bare"], strict=True)]
    spread = {f"{k}_spread": [round(min(v), 1), round(max(v), 1)] for k, v in rates.items()}
    return {
        "batch": len(batches[0]), "actor_tokens_per_s": round(median(rates["actor"]), 1),
        "bare_tokens_per_s": round(median(rates["bare"]), 1), "ratio": round(median(ratios), 4),
        "ratios": [round(r, 3) for r in ratios], "acceptance_length": length, "seconds": round(seconds, 2), **spread,
    }  # fmt: skip


def _capture_cell(
    server: Any, batches: Sequence[Sequence[Prompt]], sampling: SamplingParams, config: ClusterConfig
) -> dict[str, Any]:
    timeout_s = config.coordinator.call_timeout_s
    costs, rates, taking, bandwidth, missing = [], [], [], [], 0
    for repeat, prompts in enumerate(batches):
        per_token = {}
        for keep in (False, True) if repeat % 2 else (True, False):
            tokens, seconds, _ = _through_actor(server, prompts, sampling, repeat, config, keep)
            per_token[keep] = seconds / tokens
            if keep:
                started = time.monotonic()
                pending, _ = server.take_states.options(num_returns=2).remote(repeat, EPOCH)
                chunk = fetch(pending, timeout_s, "the hidden states")
                took, rate = time.monotonic() - started, chunk.num_bytes / seconds
        if repeat:
            costs.append(100 * (per_token[True] / per_token[False] - 1))
            rates.append(1 / per_token[False])
            taking.append(took)
            bandwidth.append(rate)
            missing += chunk.num_missing
    return {
        "batch": len(batches[0]), "cost_percent": round(median(costs), 2),
        "costs_percent": [round(c, 2) for c in costs],
        "tokens_per_s_without": round(median(rates), 1), "bytes_per_s": round(median(bandwidth)),
        "take_seconds": round(median(taking), 4), "take_bytes": chunk.num_bytes, "missing": missing,
    }  # fmt: skip


def _through_actor(
    server: Any,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    repeat: int,
    config: ClusterConfig,
    keep_states: bool = False,
) -> tuple[int, float, float | None]:
    """(tokens, seconds, acceptance length) as the coordinator would drive it."""
    work = [GroupWork(f"{repeat}.{i}", p, (0,), (i,), sampling, keep_states) for i, p in enumerate(prompts)]
    budget_s, timeout_s = config.rollout.advance_budget_s, config.coordinator.call_timeout_s
    tokens, done, steps, accepted = 0, 0, 0, 0
    started = time.monotonic()
    fetch(server.submit.remote(work, EPOCH), timeout_s, "the submission")
    while done < len(work):
        for rollout in fetch(server.advance.remote(budget_s, EPOCH), timeout_s, "the rollout server").finished:
            done, tokens = done + 1, tokens + len(rollout.response_ids)
            steps += rollout.acceptance.verify_steps
            accepted += rollout.acceptance.num_accepted_tokens
    return tokens, time.monotonic() - started, round(1 + accepted / steps, 3) if steps else None
