"""Who used which slot when: the spans of the slot timeline, and slot-seconds by role within rollout phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.core.protocols import Clock
from services.core.types import SlotLease, SlotSpan, SlotState


class Timeline:
    """Seconds are since the start of the run, which was `elapsed_s` ago. `label` names the phase under way; no span
    outlasts its phase.

    Idle and drafting seconds count only inside a window (`open_window` to `close_window`), of a rollout phase or of a
    policy's training beside which slots may train the drafter: a slot that has nothing to generate there is either IDLE
    (unused) or DRAFTING (the idle time put to use).
    """

    def __init__(self, num_slots: int, clock: Clock, emit: Callable[[SlotSpan], None], elapsed_s: float = 0.0) -> None:
        self._clock = clock
        self._emit = emit
        now = clock()
        self._start = now - elapsed_s
        self._open = dict.fromkeys(range(num_slots), (SlotState.IDLE, now, ""))
        self._window: dict[int, float] | None = None
        self._seconds: dict[SlotState, float] = {}
        self.label = ""

    def now(self) -> float:
        return self._clock() - self._start

    def slot_changed(self, before: SlotLease, after: SlotLease, now: float) -> None:
        """For LeaseBook's `on_change`."""
        self._count(after.slot, now)
        self._cut(after.slot, now)
        self._open[after.slot] = (after.state, now, self.label)

    @contextmanager
    def span(self, slot: str, role: str) -> Iterator[None]:
        """A span of something that holds no slot lease: the policy trainer, the reward workers."""
        start = self.now()
        try:
            yield
        finally:
            self._emit(SlotSpan(slot, role, start, self.now(), self.label))

    def open_window(self) -> None:
        now = self._clock()
        self._window = dict.fromkeys(self._open, now)
        self._seconds = {}

    def close_window(self) -> dict[SlotState, float]:
        """Slot-seconds by state since `open_window`, summed over slots."""
        now = self._clock()
        for slot in self._open:
            self._count(slot, now)
        self._window = None
        return dict(self._seconds)

    def enter(self, label: str) -> None:
        """A phase begins: spans that are open are cut here and go on under its name."""
        self.close()
        self.label = label
        self._open = {slot: (state, since, label) for slot, (state, since, _) in self._open.items()}

    def open_spans(self) -> list[SlotSpan]:
        """What goes on in the slots, up to now; nothing is emitted."""
        now = self.now()
        return [
            SlotSpan(f"slot {slot}", state.value, since - self._start, now, label)
            for slot, (state, since, label) in self._open.items()
        ]

    def close(self) -> None:
        """Emit what is still open, up to now."""
        now = self._clock()
        for slot, (state, _, label) in list(self._open.items()):
            self._cut(slot, now)
            self._open[slot] = (state, now, label)

    def _count(self, slot: int, now: float) -> None:
        if self._window is not None:
            state = self._open[slot][0]
            self._seconds[state] = self._seconds.get(state, 0.0) + now - self._window[slot]
            self._window[slot] = now

    def _cut(self, slot: int, now: float) -> None:
        state, since, label = self._open[slot]
        if now > since:
            self._emit(SlotSpan(f"slot {slot}", state.value, since - self._start, now - self._start, label))
