"""Small simulated clusters for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.report.run_folder import RunFolder
from services.simulator.agenda import Agenda, VirtualWaiter
from services.simulator.learning import GivenAcceptance
from services.simulator.scenario import LogNormal, Scenario, Seconds
from services.simulator.world import Simulated, build_inputs, build_services, fail_now_and_then, simulate
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


def record(config: ClusterConfig, assumed: Scenario, folder: Path) -> Path:
    """The run folder of a run of services that are not there."""
    run = config.run.model_copy(update={"dir": folder.parent, "id": folder.name})
    config = config.model_copy(update={"run": run})
    observed(config, assumed, lambda agenda: RunFolder(config, clock=agenda))
    return folder


def observed(config: ClusterConfig, assumed: Scenario, observer: Callable[[Agenda], Any]) -> None:
    """A run, told to an observer under its clock."""
    agenda = Agenda()
    waiter = VirtualWaiter(agenda, assumed.seconds.turn, lambda: 0.0)
    services, inputs = build_services(config, assumed, waiter), build_inputs(config, assumed)
    fail_now_and_then(services, assumed, agenda)
    Coordinator(config, inputs, services, observer(agenda), agenda).run()


def known_world(**changes: Any) -> Scenario:
    """Drafts are always accepted alike; all reads are of one dense block, as the native engine's."""
    return scenario(dense=True, learning=GivenAcceptance(chain=(0.8, 0.7, 0.6)), policy_gpus=1, **changes)


def lockstep_cluster(slots: int = 1, mode: str = "off", **changes: Any) -> ClusterConfig:
    """All rollouts of a server run at once."""
    engine = {"type": "native", "max_running": 32, "max_len": 4096}
    return cluster(slots, mode, **{"steps": 4, "groups": 8, "engine": engine, **changes})


def chain_of(depth: int, slots: int = 1) -> ClusterConfig:
    tree = lockstep_cluster(slots, "static").model_dump()
    tree["speculation"]["selector"]["strategy"] = {"drafter": "eagle", "depth": depth, "num_draft_tokens": depth + 1}
    tree["drafter"]["training"]["when"] = "never"
    return ClusterConfig.model_validate(tree)
