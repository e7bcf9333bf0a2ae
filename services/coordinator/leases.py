"""Slot leases: who may use a GPU slot. A pure state machine; the clock is an argument.

    IDLE ──> ROLLOUT <──> DRAINING ──> IDLE        the rollout server holds the slot (draining: it gets no new work)
    IDLE ──> DRAFTING ──> IDLE                     the drafter trainer holds it
    IDLE ──> POLICY ──> IDLE                       a colocated policy worker holds it
    any  ──> LOST ──> IDLE                         the holder died or its lease ran out; it may come back

The epoch grows whenever the holder changes, so whatever a former holder still sends carries a stale epoch and is
refused. ROLLOUT <-> DRAINING keeps the holder and therefore the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from services.core.errors import StaleEpochError
from services.core.types import SlotLease, SlotState

S = SlotState
NEXT: dict[SlotState, frozenset[SlotState]] = {
    S.IDLE: frozenset({S.ROLLOUT, S.DRAFTING, S.POLICY, S.LOST}),
    S.ROLLOUT: frozenset({S.DRAINING, S.IDLE, S.LOST}),
    S.DRAINING: frozenset({S.ROLLOUT, S.IDLE, S.LOST}),
    S.DRAFTING: frozenset({S.IDLE, S.LOST}),
    S.POLICY: frozenset({S.IDLE, S.LOST}),
    S.LOST: frozenset({S.IDLE}),
}
SERVING = frozenset({S.ROLLOUT, S.DRAINING})
HELD = SERVING | {S.DRAFTING, S.POLICY}

OnChange = Callable[[SlotLease, SlotLease, float], None]


class LeaseBook:
    """All slots' leases. `on_change(before, after, now)` sees every change of state."""

    def __init__(
        self, num_slots: int, lease_s: float, now: float, on_change: OnChange | None = None, first_epoch: int = 0
    ) -> None:
        self._lease_s = lease_s
        self._on_change = on_change
        self._leases = [SlotLease(slot, S.IDLE, first_epoch, now + lease_s) for slot in range(num_slots)]
        self._slots: dict[SlotState, set[int]] = {state: set() for state in S}
        self._slots[S.IDLE].update(range(num_slots))
        self._first_s = now + lease_s  # no held lease runs out before that: deadlines only move away
        self.touched: set[int] = set()  # slots whose state changed since whoever looks cleared it

    def __len__(self) -> int:
        return len(self._leases)

    def __getitem__(self, slot: int) -> SlotLease:
        return self._leases[slot]

    def state(self, slot: int) -> SlotState:
        return self._leases[slot].state

    def in_state(self, *states: SlotState) -> list[int]:
        return sorted(chain.from_iterable(self._slots[state] for state in frozenset(states)))

    def count(self, *states: SlotState) -> int:
        return sum(len(self._slots[state]) for state in frozenset(states))

    def change(self, slot: int, state: SlotState, epoch: int, now: float) -> SlotLease:
        """Move a slot on behalf of whoever knows its current `epoch`.

        Raises StaleEpochError for any other epoch; an impossible transition is a programming error.
        """
        before = self._checked(slot, epoch)
        assert state in NEXT[before.state], f"slot {slot}: {before.state} -> {state}"
        same_holder = before.state in SERVING and state in SERVING
        after = SlotLease(slot, state, before.epoch + (not same_holder), now + self._lease_s)
        self._leases[slot] = after
        self._slots[before.state].discard(slot)
        self._slots[state].add(slot)
        self.touched.add(slot)
        if self._on_change is not None:
            self._on_change(before, after, now)
        return after

    @property
    def heartbeat_s(self) -> float:
        """How often to renew what is to be kept: a late one, or one that is missed, does no harm."""
        return self._lease_s / 3

    def renew(self, slot: int, epoch: int, now: float) -> None:
        """A heartbeat of the holder: any acknowledged command counts. Raises StaleEpochError for a former holder."""
        self._leases[slot] = SlotLease(slot, self._checked(slot, epoch).state, epoch, now + self._lease_s)

    def expired(self, now: float) -> list[int]:
        """Held slots whose holder has been silent past its deadline."""
        if now <= self._first_s:
            return []
        held = [lease for lease in self._leases if lease.state in HELD]
        late = [lease.slot for lease in held if now > lease.deadline_s]
        # Those that are late are looked at again, until somebody takes their leases away.
        self._first_s = min([now + self._lease_s, *(lease.deadline_s for lease in held)])
        return late

    def _checked(self, slot: int, epoch: int) -> SlotLease:
        lease = self._leases[slot]
        if epoch != lease.epoch:
            raise StaleEpochError(f"slot {slot} is at epoch {lease.epoch}, not {epoch}: ask for a new lease")
        return lease
