"""Whose turn it is on GPUs that rollout servers and a colocated policy trainer share.

    rollout servers have the memory ──begin──> they release it ──> leases: POLICY ──> the policy takes it, and trains
                                   <──end────  leases: IDLE  <── the policy releases it, its weights in host memory

Each side has said that it let go before the other is told to take: what a lease says is true of the memory. Servers
take theirs back as they are opened, so that one that died meanwhile is replaced and loaded as ever. Where both sides
fit (`placement.resident`) they take turns all the same, and keep what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.coordinator.assembly import Parts
from services.coordinator.drafting import Drafting
from services.coordinator.leases import HELD
from services.core.errors import GpuMemoryError
from services.core.protocols import Pending, PolicyClient
from services.core.types import MemorySwitch, SlotState


class Turns:
    """Of a policy that has GPUs of its own there are none, and `begin` and `end` do nothing. `ask` waits for an answer
    of the policy trainer."""

    def __init__(
        self, parts: Parts, drafting: Drafting, policy: PolicyClient, ask: Callable[[Pending[Any]], Any]
    ) -> None:
        self._colocated, self._lends = parts.config.placement.colocated, parts.config.placement.lends_memory
        self._fleet, self._leases, self._trainers = parts.fleet, parts.leases, parts.trainers
        self._clock, self._telemetry = parts.clock, parts.telemetry
        self._drafting, self._policy, self._ask = drafting, policy, ask

    def begin(self, step: int | None = None) -> None:
        """The policy's: every slot that is not lost becomes its own. No slot has work, and no drafter trains any more;
        what they learned last may still be on its way to host memory, and with a `step` so are the hidden states that
        the servers kept of it, on theirs to the drafter trainers (see `Fleet.take_rest`)."""
        if not self._colocated:
            return
        self._drafting.leave()
        self._fleet.lend(step, self._trainers.add_chunk)
        assert not self._leases.in_state(*HELD), "a slot is held by somebody else in the policy's turn"
        for slot in self._leases.in_state(SlotState.IDLE):
            self._leases.change(slot, SlotState.POLICY, self._leases[slot].epoch, self._clock())
        self._switch(release=False)

    def take_states(self, step: int | None) -> None:
        """While the policy trains: have the drafter trainers sent what servers that worked to the end of `step` kept of
        it; None: nobody wants it. In no slot a drafter trains."""
        if self._colocated:
            self._fleet.take_rest()
        elif step is not None:
            for chunk, blob in self._fleet.take_states(step):
                self._trainers.add_chunk(chunk, blob)

    def end(self) -> None:
        """The servers': slots become IDLE, to be opened. Of a run's first turn, which is theirs, too."""
        if not self._colocated:
            return
        self._switch(release=True)
        for slot in self._leases.in_state(SlotState.POLICY):
            self._leases.change(slot, SlotState.IDLE, self._leases[slot].epoch, self._clock())

    def heard(self) -> None:
        """The policy answered: that is the heartbeat of the slots it holds."""
        for slot in self._leases.in_state(SlotState.POLICY):
            self._leases.renew(slot, self._leases[slot].epoch, self._clock())

    def _switch(self, release: bool) -> None:
        if not self._lends:
            return
        try:
            switch: MemorySwitch | None = self._ask(self._policy.switch_memory(release))
        except GpuMemoryError as error:
            lost = self._leases.in_state(SlotState.LOST)
            if not lost:
                raise
            slots = ", ".join(str(slot) for slot in lost)
            raise GpuMemoryError(
                f"{error}; servers that fell silent may hold memory of their GPUs still, of the lost slots {slots}"
            ) from error
        if switch is not None:
            self._telemetry.switched(switch)
