"""Small simulated clusters for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.config.schema import ClusterConfig
from services.simulator.scenario import LogNormal, Scenario, Seconds
from services.simulator.world import Simulated, simulate
from services.speculation.cost_table import CostTable

CHAINS = [{"drafter": "eagle", "depth": d, "num_draft_tokens": d + 1} for d in (1, 3)]
SELECTORS: dict[str, Any] = {
    "off": {"type": "fixed"},
    "static": {"type": "fixed", "strategy": CHAINS[1]},
    "full": {"type": "adaptive", "strategies": CHAINS},
}


def cluster(
    slots: int = 4,
    mode: str = "full",
    steps: int = 3,
    groups: int = 4,
    coordinator: dict[str, Any] | None = None,
    **rollout: Any,
) -> ClusterConfig:
    """`groups` of four rollouts for each slot."""
    return ClusterConfig.model_validate(
        {
            "rollout": {
                "num_servers": slots,
                "group_size": 4,
                "prompts_per_step": groups * slots,
                "engine": {"type": "native", "max_running": 8, "max_len": 4096},
                "sampling": {"max_tokens": 2000},
                "advance_budget_s": 1.0,
                **rollout,
            },
            "speculation": {"selector": SELECTORS[mode]},
            "drafter": {"micro_step_budget_s": 1.0, "training": {"when": "always"}},
            "coordinator": coordinator or {},
            "run": {"steps": steps, "eval_prompts": 0, "checkpoint_every": 0},
        }
    )


def scenario(sigma: float = 1.0, **changes: Any) -> Scenario:
    seconds = Seconds(micro_step=0.2, restart=3.0)
    lengths = LogNormal(200, sigma, 2000)
    base = Scenario(CostTable.typical(), lengths, seconds=seconds, prompt_tokens=50, policy_gpus=4, stretch=50)
    return replace(base, **changes)


def run(config: ClusterConfig, assumed: Scenario) -> Simulated:
    return simulate(config, assumed, lambda: 0.0)
