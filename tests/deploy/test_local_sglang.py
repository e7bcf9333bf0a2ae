"""A run in one process whose rollout servers are SGLang's adapter over the fake engine: the drafter trains on the
states that the engines kept, through the real capture, and everything else is the real service."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deploy.inprocess import (
    LocalDrafterClient,
    LocalHost,
    LocalPolicyClient,
    LocalRewardClient,
    LocalRolloutClient,
    LocalService,
)
from deploy.inputs import load_inputs, needs_drafter
from deploy.modes import in_mode, modes_of
from services.config.schema import ClusterConfig, SGLangEngine
from services.coordinator.coordinator import Coordinator
from services.coordinator.services import Services
from services.core.protocols import Blob
from services.drafter.service import DrafterService, build_drafter_service
from services.drafter.state import initial_drafter_state
from services.policy.advantage import advantages
from services.policy.service import build_policy_service
from services.reward.service import build_reward_service
from services.rollout.service import RolloutService
from services.rollout.sglang.build import build_sglang_engine
from services.rollout.sglang.order import strategies_by_depth
from services.speculation.strategy import OFF
from tests.deploy.tiny_run import make_model_folder, tiny_run
from tests.services.coordinator.world import Recorder
from tests.services.rollout.sglang.fake import MAX_LEN, FakeHandle

torch.set_num_threads(1)


CHAINS = [{"drafter": "eagle", "depth": d, "num_draft_tokens": d + 1} for d in (1, 3)]
SELECTORS = {
    "fixed": {"type": "fixed", "strategy": CHAINS[1]},
    "switching": {"type": "beg_mab", "epsilon": 1.0, "buckets": [{"strategies": [{}, *CHAINS]}]},  # at random
}


def config_of(model: Path, runs: Path, selector: str, states: str = "engine") -> ClusterConfig:
    return tiny_run(
        model,
        runs,
        speculation={"selector": SELECTORS[selector]},
        rollout={
            "num_servers": 2, "group_size": 4, "prompts_per_step": 3, "advance_budget_s": 0.05,
            "engine": {"type": "sglang", "max_running": 16, "max_len": MAX_LEN}, "sampling": {"max_tokens": 40},
        },
        drafter={"micro_step_budget_s": 0.05, "pack_tokens": 256, "states": states},
        placement={"mode": "local"},
        run={"dir": str(runs), "steps": 3, "eval_prompts": 2, "compare_prompts": 0, "checkpoint_every": 0},
    )  # fmt: skip


def rollout_service(config: ClusterConfig, slot: int) -> RolloutService:
    engine, strategies = config.rollout.engine, strategies_by_depth(config.speculation)
    assert isinstance(engine, SGLangEngine)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval().requires_grad_(False)

    def start(arguments: Mapping[str, Any], server: str, config: ClusterConfig) -> FakeHandle:
        several = tuple(strategies.values()) if len(strategies) > 1 else ()
        return FakeHandle(model, strategies[max(strategies)], switching=several)

    adapter = build_sglang_engine(config, engine, slot, start)
    return RolloutService(adapter, {s.name: s for s in (OFF, *strategies.values())}, time.monotonic)


def run(config: ClusterConfig, drafters: list[DrafterService], observer: Recorder) -> dict[str, Any]:
    host, reward = LocalHost(time.monotonic, time.sleep), build_reward_service(config)
    policy = build_policy_service(config)
    services = Services(
        rollout=[LocalRolloutClient(LocalService(f"rollout-{i}", lambda i=i: rollout_service(config, i), host))
                 for i in range(2)],
        drafters=[LocalDrafterClient(LocalService(f"drafter-{i}", lambda d=d: d, host))
                  for i, d in enumerate(drafters)],
        policy=LocalPolicyClient(LocalService("policy", lambda: policy, host)),
        reward=LocalRewardClient(LocalService("reward", lambda: reward, host)),
        waiter=host,
        initial_drafter=Blob(initial_drafter_state(config)) if drafters else None,
        advantages=partial(advantages, algorithm=config.policy.algorithm),
    )  # fmt: skip
    try:
        return Coordinator(config, load_inputs(config), services, observer, time.monotonic).run()
    finally:
        reward.close()


@pytest.mark.parametrize("mode", ["off", "static", "ema", "tlt", "full"])
def test_every_mode_of_bench_e2e_runs(tmp_path: Path, mode: str) -> None:
    """With the selector's words to the engine, the strategies it must capture, and the drafter trainers that the mode
    has. (Which strategy runs when, the fake draws at random.)"""
    config = config_of(make_model_folder(tmp_path / "model"), tmp_path / "runs", "fixed", "policy")
    assert list(modes_of(config)) == ["off", "static", "ema", "tlt", "full"]
    config = in_mode(config, mode)
    drafters = [build_drafter_service(config, i) for i in range(2)] if needs_drafter(config) else []
    observer = Recorder()
    summary = run(config, drafters, observer)
    assert summary["status"] == "finished" and summary["rollouts"] == 36
    assert bool(drafters) == (mode != "off")
    ran = {name for m in observer.steps for name in m.steps_by_strategy} - {"off"}
    assert bool(ran) == (mode != "off") and ran <= {s.name for s in strategies_by_depth(config.speculation).values()}
    if mode in ("static", "ema"):
        assert not any(m.drafter_micro_steps for m in observer.steps), "the drafter stays as it was"


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_drafter_learns_from_what_the_engines_kept(tmp_path: Path, selector: str) -> None:
    config = config_of(make_model_folder(tmp_path / "model"), tmp_path / "runs", selector)
    chunks: list[Any] = []
    drafters = [build_drafter_service(config, i) for i in range(2)]
    add = drafters[0].add_chunk
    drafters[0].add_chunk = lambda chunk, tensors: (chunks.append((chunk, tensors)), add(chunk, tensors))[1]  # type: ignore[method-assign]
    observer = Recorder()
    summary = run(config, drafters, observer)
    assert summary["status"] == "finished" and summary["rollouts"] == 36
    assert not [e for e in observer.events if e.kind == "states_dropped"]
    for step, metrics in enumerate(observer.steps, start=1):
        mine = [(chunk, tensors) for chunk, tensors in chunks if chunk.step == step]
        rollouts = [r for g in observer.groups[step] for r in g.rollouts]
        versions = {v for r in rollouts for v in r.policy_versions}
        assert {chunk.policy_version for chunk, _ in mine} == versions and len(versions) == 1
        ids = {(*r.prompt_ids, *r.response_ids) for r in rollouts if len(r.response_ids) > 1}
        got = {tuple(s.input_ids.tolist()) for _, tensors in mine for s in tensors}
        assert all(any(whole[: len(g)] == g for whole in ids) for g in got) and len(got) == len(ids)
        assert metrics.acceptance_length_live_offline is not None
        ran = {name for r in rollouts for name in r.acceptance.steps_by_strategy}
        assert ran - {"off"} == {"eagle_3_1_4"} | ({"eagle_1_1_2"} if selector == "switching" else set())
