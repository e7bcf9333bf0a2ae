"""Virtual time: what will happen, in order, and a waiter that goes there. No threads, no sleeping; the same every time.

The coordinator asks as it asks anybody (`core.protocols`): a `Call` is answered at a moment of the agenda, and `wait`
moves the clock to the next answer. A real coordinator deals with what has arrived in turns; what arrives while it is
busy with one waits for the next. So answers within `turn_s` behind the first one are seen together with it, and at the
end of that stretch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from services.core.errors import LongtailError, WaitTimeoutError
from services.core.protocols import Pending


class Agenda:
    """The clock (call it) and what is to come. Of equal times, what was put down first happens first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __call__(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._count, action))

    @property
    def next_s(self) -> float | None:
        return self._events[0][0] if self._events else None

    def step(self) -> None:
        """Go to the next event and let it happen."""
        self.now, _, action = heapq.heappop(self._events)
        action()


class Call:
    """A `Pending` of virtual time. `settle` and `fail` end it; what comes after the first of them is ignored."""

    __slots__ = ("_agenda", "_answer", "_behind", "_error", "_on_done", "answered_s", "done", "what")

    def __init__(self, what: str, agenda: Agenda, on_done: Callable[[], None]) -> None:
        self.what, self._agenda, self._on_done = what, agenda, on_done
        self.done = False
        self.answered_s: float | None = None
        self._answer: Any = None
        self._error: LongtailError | None = None
        self._behind: list[Callable[[], None]] = []

    def settle(self, answer: Any) -> None:
        if not self.done:
            self._answer = answer
            self._end()

    def fail(self, error: LongtailError) -> None:
        if not self.done:
            self._error = error
            self._end()

    def then(self, action: Callable[[], None]) -> None:
        """Do it as soon as this has ended, which it has not yet."""
        assert not self.done
        self._behind.append(action)

    def _end(self) -> None:
        self.done, self.answered_s = True, self._agenda.now
        self._on_done()
        for action in self._behind:
            action()

    def result(self, timeout_s: float) -> Any:
        give_up_s = self._agenda.now + timeout_s
        while not self.done:
            coming = self._agenda.next_s
            if coming is None or coming > give_up_s:
                raise WaitTimeoutError(f"{self.what} has no answer within {timeout_s:g} s of virtual time")
            self._agenda.step()
        if self._error is not None:
            raise self._error
        return self._answer


class VirtualWaiter:
    """`core.protocols.Waiter` over an agenda; also counts what goes over the wire. `stopwatch`: real seconds;
    `model_s`: those spent on what a simulation computes in place of services, so that the rest is the coordinator's.
    """

    def __init__(self, agenda: Agenda, turn_s: float, stopwatch: Callable[[], float]) -> None:
        self.agenda, self._turn_s, self.stopwatch = agenda, turn_s, stopwatch
        self.questions = self.answers = self.turns = 0
        self.model_s = 0.0
        self._fresh = False

    def call(self, what: str) -> Call:
        self.questions += 1
        return Call(what, self.agenda, self._note)

    def _note(self) -> None:
        self.answers += 1
        self._fresh = True

    def wait(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[Pending[Any]]:
        began = self.stopwatch()
        self.turns += 1
        give_up_s = self.agenda.now + timeout_s
        ready = _ready(pending)
        while not ready and self._run_to_answer(give_up_s):
            ready = _ready(pending)
        self.model_s += self.stopwatch() - began
        return ready

    def _run_to_answer(self, give_up_s: float) -> bool:
        """Go on until something is answered and through the turn behind it; False when the time is up before."""
        agenda = self.agenda
        self._fresh = False
        while not self._fresh:
            if agenda.next_s is None or agenda.next_s > give_up_s:
                agenda.now = max(agenda.now, give_up_s)
                return False
            agenda.step()
        end_s = agenda.now + self._turn_s
        while agenda.next_s is not None and agenda.next_s <= end_s:
            agenda.step()
        agenda.now = end_s
        return True


def _ready(pending: Sequence[Pending[Any]]) -> list[Pending[Any]]:
    return [p for p in pending if p.done]  # type: ignore[attr-defined]
