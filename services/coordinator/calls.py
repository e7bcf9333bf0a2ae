"""Calls under way: everything the coordinator has asked for and not heard back about, in one place.

Each call has an owner (the service's name), a time-out, and continuations: `done` with the answer; `lost` when the
callee died, was replaced, or stayed silent; `gone` when the callee is well, but tensors that it was to get are lost;
`untransferred` when weights did not come over a direct connection. Without one of the latter two, that is a loss.
`turn` is the coordinator's heartbeat: it waits for anything to become ready and runs the continuations, one at a time,
in the coordinator's only thread.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from services.core.errors import BlobLostError, ServiceLostError, StaleEpochError, TransferError
from services.core.protocols import Clock, Pending, Waiter

T = TypeVar("T")
Lost = Callable[[str], None]

# The answer of a call that `wait` named ready is at hand; this only bounds its transfer.
FETCH_TIMEOUT_S = 30.0

# The longest sleep without looking at leases and at a request to stop; every answer wakes the coordinator at once.
LOOK_S = 0.5

# Of the answers that are there, so many are dealt with before the next orders go out: with a thousand servers the last
# of a crowd would otherwise hold up the first.
AT_ONCE = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    owner: str
    pending: Pending[Any]
    done: Callable[[Any], None]
    lost: Lost
    gone: Lost
    deadline_s: float
    timeout_s: float
    untransferred: Lost

    @property
    def asked_s(self) -> float:
        return self.deadline_s - self.timeout_s


class Calls:
    """`blobs_lost`: tensors went with a machine, and nobody has made them again yet.

    Thousands of calls may be under way, so that none is ever looked for: they are kept by what they wait for, by owner
    and by deadline. A deadline whose call was answered is left in its heap until it is the next one.
    """

    def __init__(self, waiter: Waiter, clock: Clock, check_stop: Callable[[], None] = lambda: None) -> None:
        self._waiter = waiter
        self._clock = clock
        self._check_stop = check_stop
        self._calls: dict[int, _Call] = {}  # by the identity of what they wait for, oldest first
        self._pending: dict[int, Pending[Any]] = {}  # that, by the same key: each turn asks for all of it
        self._owned: defaultdict[str, set[int]] = defaultdict(set)
        self._numbers = count()  # of equal times the one that was told first comes first
        self._deadlines: list[tuple[float, int, _Call]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self.blobs_lost = False
        self.answered_s = clock()  # when the answer was there that is being dealt with
        self._answers: dict[str, float] = {}
        self.waited_s = 0.0  # in all, with nothing to do

    def post(
        self,
        owner: str,
        pending: Pending[T],
        done: Callable[[T], None],
        lost: Lost,
        timeout_s: float,
        untransferred: Lost | None = None,
        gone: Lost | None = None,
    ) -> None:
        self._post(owner, pending, done, lost, timeout_s, untransferred, gone)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._clock() + delay_s, next(self._numbers), action))

    def drop(self, owner: str) -> None:
        """Forget the owner's calls: answers that still come are ignored."""
        for key in self._owned.pop(owner, ()):
            del self._calls[key], self._pending[key]

    def outstanding(self, owner: str) -> int:
        return len(self._owned.get(owner, ()))

    @property
    def under_way(self) -> tuple[_Call, ...]:
        """May be read from any thread."""
        return tuple(self._calls.values())

    @property
    def last_answers(self) -> dict[str, float]:
        """When each owner answered last, whatever it said. May be read from any thread."""
        return dict(self._answers)

    def turn(self, max_wait_s: float = LOOK_S) -> None:
        """Wait until something is ready, due or overdue, at most `max_wait_s`; then deal with it, of many answers with
        the oldest calls'.

        Raises StopRequested when the user asked to stop, and every error that is not the loss of a service.
        """
        self._check_stop()
        for pending in self._ready(max_wait_s)[:AT_ONCE]:
            call = self._calls.get(id(pending))
            # A continuation may have dropped calls of a service it found lost.
            if call is not None and call.pending is pending:
                self._forget(call)
                self._finish(call)
        self._overdue()

    def _ready(self, max_wait_s: float) -> list[Pending[Any]]:
        began_s = self._clock()
        wait_s = max(0.0, min(max_wait_s, self._next_due() - began_s))
        ready = self._waiter.wait(list(self._pending.values()), wait_s)
        self.waited_s += self._clock() - began_s
        return ready

    def _next_due(self) -> float:
        """When the next deadline or timer is."""
        while self._deadlines and not self._waits(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return min([math.inf, *(heap[0][0] for heap in (self._deadlines, self._timers) if heap)])

    def _waits(self, call: _Call) -> bool:
        return self._calls.get(id(call.pending)) is call

    def _forget(self, call: _Call) -> None:
        del self._calls[id(call.pending)], self._pending[id(call.pending)]
        owned = self._owned[call.owner]
        owned.discard(id(call.pending))
        if not owned:
            del self._owned[call.owner]

    def wait_for(self, owner: str, pending: Pending[T], timeout_s: float) -> T:
        """The answer of one call; other calls go on meanwhile. Raises ServiceLostError when its callee is lost, and
        BlobLostError when the tensors are that it was given."""
        answers: list[T] = []
        losses: list[str] = []
        gone: list[str] = []
        call = self._post(owner, pending, answers.append, losses.append, timeout_s, gone=gone.append)
        while not (answers or losses or gone):
            if not self._waits(call):  # dropped: another call found the owner lost
                losses.append("it died meanwhile")
                break
            self.turn()
        if gone:
            raise BlobLostError(gone[0])
        if losses:
            raise ServiceLostError(owner, losses[0])
        return answers[0]

    def _post(
        self,
        owner: str,
        pending: Pending[Any],
        done: Callable[[Any], None],
        lost: Lost,
        timeout_s: float,
        untransferred: Lost | None = None,
        gone: Lost | None = None,
    ) -> _Call:
        deadline_s = self._clock() + timeout_s
        call = _Call(owner, pending, done, lost, gone or lost, deadline_s, timeout_s, untransferred or lost)
        key = id(pending)
        assert key not in self._calls, f"{pending.what} is waited for twice"
        self._calls[key], self._pending[key] = call, pending
        self._owned[owner].add(key)
        heapq.heappush(self._deadlines, (deadline_s, next(self._numbers), call))
        return call

    def _finish(self, call: _Call) -> None:
        try:
            answer = call.pending.result(FETCH_TIMEOUT_S)
        except ServiceLostError as error:
            call.lost(error.reason)
        except StaleEpochError as error:
            # The service was restarted between two calls and knows nothing of its lease: its work is gone too.
            call.lost(f"restarted without its work ({error})")
        except TransferError as error:
            call.untransferred(str(error))
        except BlobLostError as error:
            self.blobs_lost = True
            call.gone(str(error))
        else:
            now = self._clock()
            self.answered_s = call.pending.answered_s or now
            self._answers[call.owner] = now
            call.done(answer)

    def _overdue(self) -> None:
        now = self._clock()
        for _, _, call in _taken(self._deadlines, now):
            if self._waits(call) and call.pending.answered_s is None:  # an answer that is there comes in its turn
                self._forget(call)
                call.lost(f"no answer to {call.pending.what} within {call.timeout_s:.0f} s")
        for _, _, action in _taken(self._timers, now):
            action()


def _taken(heap: list[tuple[float, int, T]], now: float) -> list[tuple[float, int, T]]:
    """What is due, taken out all at once: what that adds is for the next turn."""
    due = []
    while heap and heap[0][0] <= now:
        due.append(heapq.heappop(heap))
    return due
