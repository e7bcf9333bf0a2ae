"""A made-up run, driven through the observer exactly as a coordinator drives it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.config.schema import ClusterConfig
from services.core.types import (
    AcceptanceStats,
    EvalResult,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    RunEvent,
    SamplingParams,
    SlotSpan,
    StepMetrics,
    StrategySpan,
)
from services.report.run_folder import RunFolder

SAMPLING = SamplingParams(max_tokens=400, stop_token_ids=(1,))


def make_rollout(rng: random.Random, step: int, position: int, index: int, started_s: float) -> Rollout:
    length = min(400, max(8, int(rng.lognormvariate(3.6, 0.75))))
    ids = tuple(rng.randrange(3, 60) for _ in range(length))
    return Rollout(
        group_id=f"step {step}/{position:04d}",
        prompt_id=f"p{position}",
        index=index,
        seed=rng.getrandbits(48),
        prompt_ids=(5, 6, 7),
        response_ids=ids,
        rollout_logprobs=tuple(-rng.random() for _ in ids),
        text=f"{length} + 0 = {length} #{length}",
        finish_reason=FinishReason.LENGTH if length == 400 else FinishReason.STOP,
        sampling=SAMPLING,
        policy_versions=(step - 1,),
        drafter_versions=(step // 3,),
        acceptance=AcceptanceStats((2, 3, 1), 18, {"eagle_3_1_4": 6, "off": 2}),
        server=f"rollout-{position % 2}",
        started_s=started_s,
        finished_s=started_s + 0.02 * length,
    )


def make_groups(rng: random.Random, step: int, count: int = 8, size: int = 8, started_s: float = 0.0) -> list[Group]:
    groups = []
    for position in range(count):
        prompt = Prompt(f"p{position}", "12 + 7 - 35=", (5, 6, 7), "-16", "chain_sum", {"terms": 3})
        rollouts = tuple(make_rollout(rng, step, position, i, started_s) for i in range(size))
        rewards = tuple(Reward(float(ok := rng.random() < 0.4 + 0.01 * step), ok) for _ in rollouts)
        groups.append(Group(prompt, rollouts, rewards))
    return groups


def make_metrics(
    rng: random.Random, step: int, at_s: float, rollout_s: float, idle_s: float, drafting_s: float
) -> StepMetrics:
    live = 2.1 + 0.55 * (1 - 0.88**step) + rng.gauss(0, 0.02)
    return StepMetrics(
        step=step,
        at_s=at_s,
        reward_mean=min(1.0, max(0.0, 0.41 + 0.007 * step + rng.gauss(0, 0.03))),
        correct_fraction=0.4,
        num_rollouts=64,
        num_groups=8,
        response_tokens=3200,
        response_len_p50=37.0,
        response_len_p99=240.0,
        response_len_max=330,
        truncated_fraction=0.01,
        zero_variance_fraction=0.1,
        reward_errors=0,
        acceptance_length=live - 0.12 + rng.gauss(0, 0.03),
        acceptance_rate=0.4,
        acceptance_length_live_offline=live,
        acceptance_length_frozen_offline=2.1 - 0.006 * step + rng.gauss(0, 0.015),
        steps_by_strategy={
            "eagle_3_1_4": 500 + 20 * step,
            "suffix_8_1_9": 150,
            "eagle_5_4_16": 40 + 6 * step,
            "off": 260,
        },
        policy_version=step,
        drafter_version=step // 2,
        policy_loss=0.01,
        grad_norm=0.5,
        kl=0.0,
        entropy=0.4,
        surprise=0.0007,
        surprise_errors=0.9,
        logprob_gap=1e-6,
        mismatch_kl=1e-7,
        corrected_fraction=0.0,
        drafter_loss=1.2 - 0.02 * step,
        drafter_micro_steps=30,
        rollout_s=rollout_s,
        reward_s=0.3 + 0.1 * rng.random(),
        policy_s=1.6 + 0.2 * rng.random(),
        publish_s=0.15,
        idle_s=idle_s,
        drafting_s=drafting_s,
        warnings=("reward variance is small",) if step in (3, 9) else (),
        predicted_gain=1.7 if step > 1 else None,
        achieved_gain=1.6 + 0.05 * rng.random(),
    )


RATES = {"off": 1.0, "eagle_3_1_4": 2.2, "eagle_5_4_16": 2.9, "suffix_8_1_9": 1.6}  # tokens per verify step


def drain_spans(rng: random.Random, slot: str, label: str, at: float, end: float) -> list[StrategySpan]:
    """A server's rollout phase: 32 requests that end one after another, the selector drafting more as they get few."""
    cuts = [at + share * (end - at) for share in (0.0, 0.2, 0.4, 0.44, 0.6, 0.7, 0.8, 1.0)]
    why, chain, tree = "cheapest per token", "eagle_3_1_4", "eagle_5_4_16"
    plan = [
        ("off", why, 32, 17), (chain, why, 16, 9), ("suffix_8_1_9", "checks whether it pays", 9, 9), (chain, why, 8, 5),
        (tree, why, 4, 3), (tree, why, 2, 2), (tree, why, 1, 1),
    ]  # fmt: skip
    spans = []
    for (name, why, first, last), start, stop in zip(plan, cuts, cuts[1:], strict=False):
        rounds = max(1, round((stop - start) / 0.02))
        steps = rounds * (first + last) // 2
        tokens, busy = round(steps * RATES[name] * rng.uniform(0.9, 1.1)), 0.97 * (stop - start)
        off_s = tokens / steps * rounds * 0.015
        spans.append(StrategySpan(
            start, stop, name, why, rounds, busy, steps, tokens, first, last, busy * rng.uniform(0.9, 1.1), off_s, slot,
            label,
        ))  # fmt: skip
    return spans


def drive_step(folder: RunFolder, rng: random.Random, step: int, at: float, slots: int) -> float:
    """One step of the made-up run; returns its end in run seconds."""
    rollout_s = 6 + 3 * rng.random()
    idle = drafting = 0.0
    for i in range(slots):
        done = rollout_s * (1.0 if i == step % slots else rng.uniform(0.45, 0.75))
        drain, rest = done * 0.8, min(0.4, rollout_s - done)
        label, name = f"step {step}", f"slot {i}"
        folder.span(SlotSpan(name, "rollout", at, at + drain, label))
        folder.span(SlotSpan(name, "draining", at + drain, at + done, label))
        for span in drain_spans(rng, name, label, at, at + done):
            folder.strategy(span)
        if rest > 0:
            folder.span(SlotSpan(name, "idle", at + done, at + done + rest, label))
            folder.span(SlotSpan(name, "drafting", at + done + rest, at + rollout_s, label))
            idle, drafting = idle + rest, drafting + rollout_s - done - rest
    folder.rollouts(step, make_groups(rng, step, started_s=1000 + at))
    metrics = make_metrics(rng, step, 0.0, rollout_s, idle, drafting)
    trained = at + rollout_s + metrics.reward_s
    end = trained + metrics.policy_s + metrics.publish_s
    folder.span(SlotSpan("policy", "policy", trained, trained + metrics.policy_s, f"step {step}"))
    for i in range(slots):
        folder.span(SlotSpan(f"slot {i}", "idle", at + rollout_s, end, f"step {step}"))
    folder.step(replace(metrics, at_s=end))
    if step % 3 == 0:
        folder.event(RunEvent(end, "drafter_published", "drafter", f"version {step // 3} with 9 tensors"))
    return end


SUMMARY: dict[str, Any] = {
    "heldout_reward_before": 0.41,
    "heldout_reward_after": 0.56,
    "acceptance_length_first": 2.02,
    "acceptance_length_last": 2.49,
    "acceptance_length_frozen_last": 2.0,
    "rollout_seconds_off": 12.4,
    "rollout_seconds_on": 8.9,
    "greedy_mismatches": 0,
}


def drive_run(folder: RunFolder, steps: int = 5, slots: int = 2, seed: int = 0, lost: bool = True) -> float:
    """A whole run up to, but without, `finish`; returns its end in run seconds."""
    rng = random.Random(seed)
    folder.evaluation(EvalResult(0, 1.5, 128, 128, 0.41, 0.41))
    at = 2.0
    for step in range(1, steps + 1):
        start, at = at, drive_step(folder, rng, step, at, slots)
        if lost and step == 2:
            folder.event(
                RunEvent(start + 4, "server_lost", "slot 1", "rollout server 1 died (SIGKILL); 7 rollouts again")
            )
    folder.evaluation(EvalResult(steps, at + 2, 128, 128, 0.56, 0.56))
    return at + 2


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    return ClusterConfig.model_validate({"run": {"name": "demo", "dir": str(tmp_path / "runs")}})


@pytest.fixture
def folder(config: ClusterConfig) -> RunFolder:
    return RunFolder(config)


@pytest.fixture
def groups() -> list[Group]:
    return make_groups(random.Random(1), 1, count=2, size=4)


@pytest.fixture
def drive() -> Callable[..., float]:
    return drive_run


@pytest.fixture
def summary() -> dict[str, Any]:
    return dict(SUMMARY)


@pytest.fixture
def metrics() -> StepMetrics:
    return make_metrics(random.Random(2), 1, 9.0, 6.0, 1.0, 2.0)
