"""The larger parts of a coordinator, put together from its config and from the small parts that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.config.schema import ClusterConfig
from services.coordinator.calls import Calls
from services.coordinator.cores import Cores
from services.coordinator.drafting import Drafting
from services.coordinator.fleet import Fleet
from services.coordinator.forecast import Forecast
from services.coordinator.leases import LeaseBook
from services.coordinator.progress import ProgressBoard
from services.coordinator.rollout_phase import RolloutPhase
from services.coordinator.scheduler import Pace
from services.coordinator.strategies import StrategyLog
from services.coordinator.tail_moves import TailMoves
from services.coordinator.telemetry.facts import Telemetry
from services.coordinator.trainers import Trainers
from services.core.protocols import Blob, Clock
from services.core.types import RunEvent, SamplingParams


@dataclass(frozen=True, slots=True)
class Parts:
    """What everything that works on slots shares."""

    config: ClusterConfig
    fleet: Fleet
    trainers: Trainers
    leases: LeaseBook
    calls: Calls
    clock: Clock
    tell: Callable[[str, str, str], RunEvent]
    telemetry: Telemetry


def make_drafting(parts: Parts, initial_drafter: Blob | None) -> Drafting:
    drafter = parts.config.drafter
    return Drafting(
        parts.trainers,
        initial_drafter,
        parts.fleet,
        parts.leases,
        parts.calls,
        parts.clock,
        parts.tell,
        budget_s=drafter.micro_step_budget_s,
        round_s=drafter.round_s,
        checkpoints=drafter.checkpoint_dir is not None,
        telemetry=parts.telemetry,
    )


def make_phase(
    parts: Parts, drafting: Drafting, board: ProgressBoard, strategies: StrategyLog, cores: Cores | None
) -> RolloutPhase:
    rollout, section = parts.config.rollout, parts.config.coordinator
    call_timeout_s = section.call_timeout_s
    tail = TailMoves(
        rollout.consolidate,
        parts.fleet,
        parts.leases,
        parts.calls,
        parts.clock,
        parts.tell,
        capacity=rollout.engine.max_running,
        advance_budget_s=rollout.advance_budget_s,
        call_timeout_s=call_timeout_s,
    )
    return RolloutPhase(
        parts.fleet,
        parts.trainers,
        drafting,
        parts.leases,
        parts.calls,
        parts.clock,
        board,
        max_running=rollout.engine.max_running,
        pace=Pace(rollout.advance_budget_s, section.reports_per_s, section.lease_s / 4),
        call_timeout_s=call_timeout_s,
        tail=tail,
        telemetry=parts.telemetry,
        strategies=strategies,
        tell=parts.tell,
        cores=cores,
    )


def make_forecast(parts: Parts, sampling: SamplingParams) -> Forecast:
    capacity, timeout_s = parts.config.rollout.engine.max_running, parts.config.coordinator.call_timeout_s
    return Forecast(parts.fleet.servers, parts.calls, capacity, sampling, timeout_s)
