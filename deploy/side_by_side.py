"""Services in this process that seem to run side by side, each on a processor of its own.

A call is computed for real when somebody waits, one at a time; the processor time it took is laid on the time line of
its service, which serves its calls one after the other. The host's clock is the time at which the caller learns of an
answer. So runs of several slots can be compared on a machine with fewer cores, or with other work on it. Not seen: time
that a service spends waiting for other processes, and what messages take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from deploy.inprocess import LocalHost
from services.config.schema import ClusterConfig
from services.core.protocols import Clock, Pending

MICRO_STEP_S = 0.05  # about one of a pocket model's drafter


class SideBySideHost(LocalHost):
    """`work_clock` tells the time that the calls take."""

    def __init__(self, work_clock: Clock = time.process_time) -> None:
        super().__init__(self.clock, self._pass)
        self._work_clock = work_clock
        self._now = 0.0
        self._free_at: dict[str, float] = {}  # by service
        self._ends: dict[Any, float] = {}  # by call
        self._computes: tuple[float, float] | None = None  # when the call under way began, here and by the work clock

    def clock(self) -> float:
        return self._now

    def service_clock(self) -> float:
        """For the services: the time on the line of the one that computes, without the work of all others; outside of
        calls the host's."""
        if self._computes is None:
            return self._now
        start, before = self._computes
        return start + self._work_clock() - before

    def wait(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[Pending[Any]]:
        self._compute()
        until = min([self._now + timeout_s, *(self._end(p) for p in pending)])
        self._now = max(self._now, until)
        ready = [p for p in pending if self._end(p) <= self._now]
        for p in ready:
            self._ends.pop(getattr(p, "call", p), None)
        return ready

    def _compute(self) -> None:
        """All calls made since the last look: they were made just now."""
        for service in self.services:
            while service.queued:
                call = service.queued[0]
                start = max(self._now, self._free_at.get(service.name, 0.0))
                self._computes = start, self._work_clock()
                service.execute_next()
                self._free_at[service.name] = self._ends[call] = self.service_clock()
                self._computes = None

    def _end(self, pending: Any) -> float:
        """A call that failed at once, or whose result was used by another one, is over."""
        return self._ends.get(getattr(pending, "call", pending), self._now)

    def _pass(self, seconds: float) -> None:
        self._now += seconds


def single_threaded(config: ClusterConfig) -> ClusterConfig:
    """Services in one process share its number of threads; with more than one, waiting for each other is counted as
    processor time, a multiple of the work on a busy machine. Nor does a call reach a service before the one under way
    ends: a trainer that is interrupted elsewhere at its next micro-step would finish its whole budget here."""
    tree = config.model_dump()
    tree["drafter"]["micro_step_budget_s"] = min(MICRO_STEP_S, config.drafter.micro_step_budget_s)
    for section in (tree["policy"], tree["drafter"], tree["rollout"]["engine"]):
        section["threads"] = 1
    return ClusterConfig.model_validate(tree)
