"""`longtail bench policy`: how fast the policy trainer trains and publishes, alone on its GPUs.

Batches are made up: random token ids, log-normal response lengths of which a few reach the longest, advantages of both
signs. What is computed is that of a run's step, hidden states for the drafter and their way to the object store
included. Model FLOPs utilisation counts a forward and a backward pass over every token (no recomputation), by
Chowdhery et al. 2022 (PaLM, appendix B), attention at half of theirs because it is causal, and divides by the card's
dense bfloat16 peak.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from actors.clients import RayPolicyClient
from deploy.cluster import policy_alone
from deploy.provenance import provenance
from deploy.session import ray_session
from services.config.schema import ClusterConfig
from services.core.types import AcceptanceStats, FinishReason, Rollout, SamplingParams, TrainBatch
from services.models.files import model_dir, read_config
from services.models.layers import ModelSpec, model_spec

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bfloat16 of the SXM cards, NVIDIA's data sheets
SIGMA = 1.0  # of the logarithm of response lengths


@dataclass(frozen=True)
class Workload:
    """`longest` bounds prompt + response, in tokens."""

    groups: int
    group_size: int
    prompt_tokens: int
    median_tokens: int
    longest: int


@dataclass(frozen=True)
class _Step:
    """Seconds: of the whole call, of the trainer's own work, of publishing until the weights are there."""

    call_s: float
    busy_s: float
    publish_s: float
    tokens: int
    flops: float


def run_bench(config: ClusterConfig, workload: Workload, repeats: int) -> dict[str, Any]:
    """Prints a line a step; the first one, which warms up, is left out of the medians."""
    spec, rng = model_spec(read_config(model_dir(config.model.path))), random.Random(config.run.seed)
    steps: list[_Step] = []
    with ray_session(config, check=False), policy_alone(config) as handle:
        client = RayPolicyClient("policy", handle, config.weights.transport == "collective")
        for step in range(1, repeats + 2):
            steps.append(_timed(client, made_up(step, workload, spec.vocab_size, rng), spec, config))
            print(json.dumps({"step": step, **vars(steps[-1])}), flush=True)
    about, workers = provenance(), config.placement.policy_workers
    return {
        "bench": "policy", **about, "workers": workers, "dtype": config.model.dtype, "repeats": repeats,
        "activation_checkpointing": config.policy.activation_checkpointing,
        "reshard_after_forward": config.policy.reshard_after_forward,
        "optimizer_offload": config.policy.optimizer_offload, "micro_batch_tokens": config.policy.micro_batch_tokens,
        "parameters": matmul_parameters(spec), **vars(workload), **_medians(steps[1:], workers, about["card"]),
    }  # fmt: skip


def _timed(client: RayPolicyClient, batch: TrainBatch, spec: ModelSpec, config: ClusterConfig) -> _Step:
    limit_s, started = config.coordinator.call_timeout_s, time.perf_counter()
    report, chunk, _blob = client.train_step(batch)
    busy_s = report.result(limit_s).busy_s
    chunk.result(limit_s)
    trained = time.perf_counter()
    version, _weights, _head = client.publish()
    version.result(limit_s)
    lengths = [len(r.prompt_ids) + len(r.response_ids) for r in batch.rollouts]
    publish_s = time.perf_counter() - trained
    return _Step(trained - started, busy_s, publish_s, sum(lengths), training_flops(spec, lengths))


def _medians(steps: Sequence[_Step], workers: int, card: str) -> dict[str, Any]:
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    per_s = median(s.flops / s.busy_s for s in steps)
    return {
        "tokens": [s.tokens for s in steps],
        "step_s": round(median(s.busy_s for s in steps), 3),
        "step_s_spread": [round(bound(s.busy_s for s in steps), 3) for bound in (min, max)],
        "call_s": round(median(s.call_s for s in steps), 3),
        "publish_s": round(median(s.publish_s for s in steps), 3),
        "tokens_per_s": round(median(s.tokens / s.busy_s for s in steps), 1),
        "model_tflops_per_s": round(per_s / 1e12, 3),
        "model_flops_utilisation": None if peak is None else round(per_s / (peak * workers), 4),
    }


def matmul_parameters(spec: ModelSpec) -> int:
    """Weights that every token is multiplied with: the layers' and the LM head's, tied or not."""
    q, k, v = spec.qkv_sizes
    layer = spec.hidden_size * (q + k + v) + q * spec.hidden_size + 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * layer + spec.hidden_size * spec.vocab_size


def training_flops(spec: ModelSpec, lengths: Sequence[int]) -> float:
    """Forward and backward: 6 for each weight and token, and of attention 12 for each layer, query dimension and pair
    of tokens, half of which a causal mask leaves."""
    attention = 6 * spec.num_layers * spec.qkv_sizes[0] * sum(length**2 for length in lengths)
    return 6.0 * matmul_parameters(spec) * sum(lengths) + attention


def made_up(step: int, workload: Workload, vocab_size: int, rng: random.Random) -> TrainBatch:
    rollouts = tuple(
        _rollout(f"{step}/{group}", index, workload, vocab_size, rng)
        for group in range(workload.groups)
        for index in range(workload.group_size)
    )
    return TrainBatch(step, rollouts, tuple(1.0 if r.index % 2 else -1.0 for r in rollouts))


def _rollout(group: str, index: int, workload: Workload, vocab_size: int, rng: random.Random) -> Rollout:
    drawn = round(workload.median_tokens * math.exp(rng.gauss(0.0, SIGMA)))
    count = max(1, min(drawn, workload.longest - workload.prompt_tokens))
    ids = [rng.randrange(vocab_size) for _ in range(workload.prompt_tokens + count)]
    logprob = -math.log(vocab_size)  # as random weights would have it
    return Rollout(
        group_id=group, prompt_id=group, index=index, seed=index, prompt_ids=tuple(ids[: workload.prompt_tokens]),
        response_ids=tuple(ids[workload.prompt_tokens :]), rollout_logprobs=(logprob,) * count, text="",
        finish_reason=FinishReason.STOP, sampling=SamplingParams(1.0, max_tokens=workload.longest),
        policy_versions=(0,), drafter_versions=(0,), acceptance=AcceptanceStats(),
    )  # fmt: skip
