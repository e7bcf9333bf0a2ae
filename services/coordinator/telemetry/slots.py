"""How long each slot was in which role, and its idle windows, from the changes of its lease; and how long others worked
who hold no slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from services.coordinator.leases import SERVING
from services.core.types import SlotState

# Servers released one after the other at the end of a phase leave gaps that are no windows.
LEAST_WINDOW_S = 0.001
FREE = frozenset({SlotState.IDLE, SlotState.DRAFTING})


class SlotTimes:
    """`spent(slot, role, seconds)` gets every second of every slot once. `window(seconds)` gets each idle window: a
    slot's server ran dry while another one still generated; it ends when the slot serves again or is lost, or when
    nobody generates any more. `counts`: slots by state."""

    def __init__(
        self,
        num_slots: int,
        now: float,
        spent: Callable[[int, SlotState, float], None],
        window: Callable[[float], None],
    ) -> None:
        self.states = [SlotState.IDLE] * num_slots
        self.counts = Counter(self.states)
        self._since = [now] * num_slots
        self._free_since: dict[int, float] = {}
        self._spent, self._window = spent, window

    def change(self, slot: int, state: SlotState, now: float) -> None:
        self._count(slot, now)
        before, self.states[slot] = self.states[slot], state
        self.counts[before] -= 1
        self.counts[state] += 1
        serving = any(self.counts[s] for s in SERVING)
        if state not in FREE:
            self._close(slot, now)
        elif before in SERVING and serving:
            self._free_since[slot] = now
        if not serving:
            for free in list(self._free_since):
                self._close(free, now)

    def tick(self, now: float) -> None:
        """Count what goes on, up to now."""
        for slot in range(len(self.states)):
            self._count(slot, now)

    def _count(self, slot: int, now: float) -> None:
        seconds = max(0.0, now - self._since[slot])  # a tick of another thread may have been later
        self._spent(slot, self.states[slot], seconds)
        self._since[slot] += seconds

    def _close(self, slot: int, now: float) -> None:
        since = self._free_since.pop(slot, None)
        if since is not None and now - since >= LEAST_WINDOW_S:
            self._window(now - since)


class WorkTimes:
    """Of the policy trainer and the reward workers: `spent(holder, seconds)` gets a piece of work while it lasts, and
    at its end what is left of the seconds that it really took."""

    def __init__(self, spent: Callable[[str, float], None]) -> None:
        self._spent = spent
        self._open: dict[str, tuple[float, float]] = {}  # since when, and what was counted of it

    def begin(self, holder: str, now: float) -> None:
        self._open.setdefault(holder, (now, 0.0))

    def tick(self, now: float) -> None:
        for holder, (since, counted) in self._open.items():
            self._spent(holder, max(0.0, now - since - counted))
            self._open[holder] = (since, max(counted, now - since))

    def end(self, holder: str, seconds: float) -> None:
        _, counted = self._open.pop(holder, (0.0, 0.0))
        self._spent(holder, max(0.0, seconds - counted))
