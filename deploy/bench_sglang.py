"""`longtail bench sglang`: what the rollout server costs on top of a bare SGLang engine, and how long versions travel.

Throughput: the same prompts, greedy, through the rollout actor and through a bare `sglang.Engine` with the very same
arguments in another actor on the same GPU; one after the other within every repeat, in turns first, the first repeat
dropped. `ratio` is the median of the repeats' own ratios. Capture: the rollout actor alone, with and without hidden
states kept for the drafter, in turns; handing the states over is timed by itself. Every repeat has prompts that no
cache has seen. A small model is bound by the CPU that launches its kernels, and all these figures with it: `longtail
grow` one. Publishing: a publisher actor hands weights of a 7B shape (constant numbers) to a rollout actor with such an
engine, over the object store, as the policy trainer and the drafter trainers do; the clock runs until the engine says
that it serves them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from actors.rollout import RolloutActor
from deploy.inputs import load_inputs
from deploy.placement import actor_env
from deploy.provenance import provenance
from deploy.session import ray_session
from services.config.schema import ClusterConfig, SGLangEngine
from services.core.errors import ConfigError, WaitTimeoutError
from services.core.types import GroupWork, Prompt, SamplingParams
from services.drafter.state import read_drafter
from services.models.files import drafter_dir, model_dir, read_config, read_grown, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.models.target import target_names
from services.rollout.sglang.arguments import sampling_arguments
from services.rollout.sglang.build import slot_arguments
from services.rollout.sglang.launch import start_engine

BATCHES = (1, 8, 32, 64)
CAPTURE_BATCHES = (8, 32, 64)
EPOCH = 1
STORE_7B = 40 * 10**9  # two versions of 15 GB and room
SHAPE_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


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


class Publisher:
    """Stands for a trainer: holds weights, hands them out as results of a call."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def ready(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def publish(self) -> dict[str, torch.Tensor]:
        return self._tensors


def run_bench(config: ClusterConfig, repeats: int, publishing: bool) -> dict[str, Any]:
    """Prints a table; returns cells, their smallest ratio, and the publishing figures."""
    if not isinstance(config.rollout.engine, SGLangEngine):
        raise ConfigError("bench sglang needs a configuration with rollout.engine.type: sglang")
    if publishing and config.placement.object_store_bytes < STORE_7B:
        raise ConfigError(
            f"weights of a 7B shape pass through the object store: set placement.object_store_bytes to {STORE_7B}, or "
            "leave them out with --no-publish"
        )
    with ray_session(config):
        cells, capture = _throughput(config, repeats)
        publish = _publishing(config, repeats) if publishing else None
    return {
        "bench": "sglang",
        "provenance": provenance(),
        "grown": read_grown(model_dir(config.model.path)),
        "seed": config.run.seed,
        "strategy": config.speculation.strategies[0].model_dump(),
        "max_tokens": config.rollout.sampling.max_tokens,
        "repeats": repeats,
        "cells": cells,
        "actor_vs_bare_min": min(cell["ratio"] for cell in cells),
        "capture": capture,
        "publish": publish,
    }


def _throughput(config: ClusterConfig, repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(rollout server against bare engine, with against without capture). None without an EAGLE drafter."""
    inputs = load_inputs(config)
    share = config.placement.gpus_per_slot
    captures = config.speculation.strategies[0].drafter == "eagle" and config.drafter.method == "eagle"
    changed = config.drafter.model_copy(update={"states": "engine" if captures else "policy"})
    config = config.model_copy(update={"drafter": changed})
    server = ray.remote(RolloutActor).options(num_gpus=share).remote(config, 0)
    bare = ray.remote(BareEngine).options(num_gpus=share).remote(config)
    try:
        wait_s = config.coordinator.start_timeout_s
        _get([server.process_id.remote(), bare.ready.remote()], wait_s, "both engines to start")
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
    _get(server.open_epoch.remote(EPOCH), timeout_s, "the epoch")
    _get(server.load_policy.remote(0, policy, EPOCH), timeout_s, "the policy load")
    if config.speculation.strategies[0].drafter == "eagle":
        method = drafter_method(config.drafter, spec)
        drafter = read_drafter(drafter_dir(config.model.path, method.name), method)
        _get(server.load_drafter.remote(0, drafter, EPOCH), timeout_s, "the drafter load")


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
                tokens, seconds = _get(bare.generate.remote(ids, sampling), timeout_s, "the bare engine")
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
                chunk = _get(pending, timeout_s, "the hidden states")
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
    _get(server.submit.remote(work, EPOCH), timeout_s, "the submission")
    while done < len(work):
        for rollout in _get(server.advance.remote(budget_s, EPOCH), timeout_s, "the rollout server").finished:
            done, tokens = done + 1, tokens + len(rollout.response_ids)
            steps += rollout.acceptance.verify_steps
            accepted += rollout.acceptance.num_accepted_tokens
    return tokens, time.monotonic() - started, round(1 + accepted / steps, 3) if steps else None


def _publishing(config: ClusterConfig, repeats: int) -> dict[str, Any]:
    """Seconds from a trainer's finished weights to the engine's word that it serves them."""
    with tempfile.TemporaryDirectory() as folder:
        big = _big_config(config, Path(folder))
        spec = model_spec(SHAPE_7B)
        shapes = {"drafter": drafter_method(big.drafter, spec).names(), "policy": target_names(spec)}
        server = ray.remote(RolloutActor).options(num_gpus=1).remote(big, 0)
        publisher_class = ray.remote(Publisher).options(runtime_env={"env_vars": actor_env(config.policy.threads)})
        publishers = {kind: publisher_class.remote(names) for kind, names in shapes.items()}
        waits = [server.process_id.remote(), *(p.ready.remote() for p in publishers.values())]
        sizes = _get(waits, config.coordinator.start_timeout_s, "the 7B-shaped engine")[1:]
        _get(server.open_epoch.remote(EPOCH), config.coordinator.call_timeout_s, "the epoch")
        figures = {}
        for (kind, publisher), size in zip(publishers.items(), sizes, strict=True):
            figures[kind] = _publish(server, publisher, kind, size, repeats, config.coordinator.call_timeout_s)
            print(json.dumps({"publish": kind, **figures[kind]}), flush=True)
        for actor in (server, *publishers.values()):
            ray.kill(actor)
        return figures


def _publish(server: Any, publisher: Any, kind: str, size: int, repeats: int, timeout_s: float) -> dict[str, Any]:
    seconds = []
    for version in range(repeats + 1):
        started = time.monotonic()
        reference = publisher.publish.remote()
        served = _get(getattr(server, f"load_{kind}").remote(version, reference, EPOCH), timeout_s, f"the {kind} load")
        seconds.append(time.monotonic() - started)
        assert getattr(served, kind) == version
        del reference
    kept = seconds[1:] or seconds
    return {
        "bytes": size, "seconds": round(median(kept), 3), "spread": [round(min(kept), 3), round(max(kept), 3)],
        "gb_per_s": round(size / median(kept) / 1e9, 2),
    }  # fmt: skip


def _big_config(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """The same run on a 7B-shaped model without weights on disk."""
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir()
    drafter.mkdir()
    shutil.copy(model_dir(config.model.path) / "tokenizer.json", target)
    (target / "config.json").write_text(json.dumps(SHAPE_7B))
    method = drafter_method(config.drafter, model_spec(SHAPE_7B))
    (drafter / "config.json").write_text(json.dumps(method.folder_config(SHAPE_7B)))
    engine = {"load_format": "dummy", "kv_tokens": 16384, "max_running": 8, "mem_fraction": 0.6}
    data = config.model_dump()
    data["model"] |= {"path": str(target), "dtype": "bfloat16"}
    data["rollout"]["engine"] |= engine
    return ClusterConfig.model_validate(data)


def _get(reference: Any, timeout_s: float, what: str) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}: see the Ray logs") from None
