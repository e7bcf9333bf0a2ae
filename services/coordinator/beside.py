"""Training the drafter in the slots while the policy is trained somewhere else: all of them are idle then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from services.coordinator.assembly import Parts
from services.coordinator.drafting import Drafting
from services.core.types import SlotState


class BesidePolicy:
    """Of a run whose slots have no time for that (`ClusterConfig.drafts_beside_policy`) it does nothing."""

    def __init__(self, parts: Parts, drafting: Drafting, window: Callable[[], AbstractContextManager[None]]) -> None:
        """`window`: what counts the slots' idle and drafting seconds."""
        self._wanted, self._window = parts.config.drafts_beside_policy, window
        self._leases, self._trainers = parts.leases, parts.trainers
        self._drafting = drafting

    @contextmanager
    def training(self, slots: int) -> Iterator[None]:
        """While the body waits for the policy, so many slots train; behind it they are asked to stop, and nobody waits
        for that. What they learn is judged on the next step's rollouts: they have seen this one's."""
        if not self._wanted:
            yield
            return
        with self._window():
            for slot in self._able()[:slots]:
                self._drafting.start(slot)
            try:
                yield
            finally:
                self._drafting.stop_all()

    def _able(self) -> list[int]:
        if self._trainers.newest is None or self._drafting.live is None:
            return []
        return [slot for slot in self._leases.in_state(SlotState.IDLE) if self._trainers.is_up(slot)]
