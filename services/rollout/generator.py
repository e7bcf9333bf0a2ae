"""The generator over an engine: a thread of its own runs the rounds, coroutines ask and are told tokens as they come.

Requests join and leave between two rounds. New weights are loaded when nothing runs any more: what has begun ends on
the version that began it, what comes meanwhile waits, so no answer mixes versions and none is refused for a swap.
While nothing runs and nothing waits, the same thread lets a learner work, a micro-step at a time: what comes then waits
for that at most, and a better drafter is served from the next request on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.core.errors import (
    LongtailError,
    OverloadedError,
    RequestError,
    ServiceLostError,
    WaitTimeoutError,
    WeightError,
)
from services.core.generation import Generation, Increment
from services.core.protocols import Clock
from services.core.serving import ServerView
from services.core.types import GroupWork, PartialRollout, Rollout, ServedVersions
from services.rollout.engine import RolloutEngine
from services.rollout.tally import Tally
from services.rollout.ticket import Ticket, works_of
from services.rollout.turnover import Turnover
from services.weights.learning import Learner, NewDrafter

WAIT_S = 0.02  # for news of an engine that runs by itself; between two looks at what was asked
CLOSE_S = 60.0
# Without work for so long before a learner begins: clients that ask again when they have their answer are spared it.
GRACE_S = 0.05
REST_S = 0.5  # between two questions to a learner that had nothing to do
LOG = logging.getLogger("longtail.serving")


@dataclass(frozen=True)
class ModelWeights:
    """A policy and the drafter that goes with it, under the versions by which people know them."""

    versions: ServedVersions
    policy: Mapping[str, Tensor]
    drafter: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class _Swap:
    weights: ModelWeights
    done: Callable[[LongtailError | None], None]


class EngineGenerator:
    """At most `max_running` choices run and `max_waiting` more wait. `after_load`: what the engine has to do behind a
    load of weights, while nothing runs. `learner`: learns from every answer; it is closed with the generator."""

    def __init__(
        self,
        engine: RolloutEngine,
        max_running: int,
        max_waiting: int,
        clock: Clock,
        after_load: Callable[[], None] | None = None,
        learner: Learner | None = None,
    ) -> None:
        self._engine, self._after_load = engine, after_load or (lambda: None)
        self._learner = learner
        self._pause_s: float | None = None  # of silence before the learner may work; None: it may not
        self._idle = self._untaken = False  # nothing came for so long; answers ended that the learner does not know
        self._tally = Tally()
        self._max_running, self._max_waiting = max_running, max_waiting
        self._turnover = Turnover(clock)
        self._names = itertools.count()  # of groups
        self._loads = itertools.count(1)  # the engine's own version numbers: they grow, also when people go back
        self._current: ModelWeights | None = None
        self._waiting: deque[Ticket] = deque()
        self._running: dict[str, Ticket] = {}  # by rollout id
        self._swaps: deque[_Swap] = deque()
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._open: set[Ticket] = set()
        self._ended: ServiceLostError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- asked from coroutines

    async def generate(self, asked: Generation) -> AsyncGenerator[Increment, None]:
        works = works_of(asked, self._names, self._learner is not None)
        ticket = Ticket(asked, works, asyncio.get_running_loop())
        self._enroll(ticket)
        left = len(asked.seeds)
        try:
            while left:
                news = await ticket.news.get()
                if isinstance(news, LongtailError):
                    raise news
                left -= news.finish_reason is not None
                yield news
        finally:
            self._leave(ticket)

    async def served(self) -> ServedVersions:
        return self.versions

    def view(self, server: str) -> ServerView:
        """From any thread."""
        waiting = sum(ticket.size for ticket in tuple(self._waiting))
        learning = None if self._learner is None else self._learner.view()
        return self._tally.view(server, len(self._running), waiting, self.versions, learning)

    async def views(self) -> tuple[ServerView, ...]:
        return (self.view("0"),)

    @property
    def versions(self) -> ServedVersions:
        """What is served now; both None before the first load."""
        current = self._current
        return current.versions if current else ServedVersions(None, None)

    async def swap(self, weights: ModelWeights, timeout_s: float) -> None:
        """Returns when `weights` are served. Raises WeightError when they do not fit, and WaitTimeoutError when what
        runs does not end; what was served before is served on then."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[LongtailError | None] = loop.create_future()

        def done(error: LongtailError | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(error))

        swap = _Swap(weights, done)
        with self._changed:
            self.check()
            self._swaps.append(swap)
            self._changed.notify()
        try:
            async with asyncio.timeout(timeout_s):
                error = await answer
        except TimeoutError:
            with self._changed:
                if swap in self._swaps:
                    self._swaps.remove(swap)
            raise WaitTimeoutError(
                f"new weights waited {timeout_s:g} s for the requests under way to end; they were not loaded"
            ) from None
        if error is not None:
            raise error

    def check(self) -> None:
        """Raises ServiceLostError when the engine does not run any more."""
        if self._ended is not None:
            raise self._ended

    def close(self) -> None:
        """Ends everything under way. Raises WaitTimeoutError when a round does not come to an end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise WaitTimeoutError(f"the engine's round did not end within {CLOSE_S:g} s")
        if self._learner is not None:
            self._learner.close()

    def _enroll(self, ticket: Ticket) -> None:
        with self._changed:
            self.check()
            self._open.add(ticket)
            self._inbox.append(lambda: self._enter(ticket))
            self._changed.notify()

    def _leave(self, ticket: Ticket) -> None:
        with self._changed:
            self._open.discard(ticket)
            self._inbox.append(lambda: self._drop(ticket))
            self._changed.notify()

    # -- in the engine's thread

    def _run(self) -> None:
        ended = "it was closed"
        try:
            while not self._closing:
                self._hear()
                self._turn()
        except BaseException as error:  # told to everybody who waits, and to the thread's own hook
            ended = f"its engine failed ({type(error).__name__}: {error})"
            raise
        finally:
            self._end(ServiceLostError("this model server", ended))

    def _hear(self) -> None:
        with self._changed:
            resting = not (self._inbox or self._busy or self._closing)
            self._idle = resting and not self._changed.wait(self._pause_s) and not self._inbox
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            message()

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._running or self._swaps)

    def _turn(self) -> None:
        swap = None if self._running else self._next_swap()
        if swap is not None:
            self._load(swap)
        if not self._swaps and self._current is not None:
            self._admit()
        if self._running:
            self._told(self._engine.step(WAIT_S))
        elif self._waiting and not self._swaps:
            with self._changed:
                if not self._inbox:
                    self._changed.wait(WAIT_S)  # for the first weights
        elif self._idle and self._learner is not None:
            self._learn(self._learner)

    def _next_swap(self) -> _Swap | None:
        with self._changed:
            return self._swaps.popleft() if self._swaps else None

    def _enter(self, ticket: Ticket) -> None:
        waiting = sum(other.size for other in self._waiting)
        free = 0 if waiting else self._max_running - len(self._running)
        if waiting + ticket.size > self._max_waiting + free:
            self._tally.refused += 1
            retry_after_s = self._turnover.retry_after_s(waiting)
            ticket.tell(OverloadedError(f"{waiting} answers wait already: try again later", retry_after_s))
            return
        try:
            self._check(ticket)
        except LongtailError as error:
            ticket.tell(error)
            return
        self._waiting.append(ticket)

    def _check(self, ticket: Ticket) -> None:
        if ticket.size > self._max_running:
            raise RequestError(f"{ticket.size} answers at a time, at most {self._max_running} run here: ask for fewer")
        for work in ticket.works:
            self._engine.check(work)

    def _drop(self, ticket: Ticket) -> None:
        """Whatever there still is of it: nothing, when all its choices have ended."""
        self._waiting = deque(t for t in self._waiting if t is not ticket)
        ids = frozenset(i for i in ticket.rollout_ids if self._running.pop(i, None) is not None)
        if ids:
            self._told(self._engine.withdraw(ids).finished)

    def _admit(self) -> None:
        """All there is room for at once: an engine may compute the prompts of one submission together."""
        works: list[GroupWork] = []
        while self._waiting and len(self._running) + self._waiting[0].size <= self._max_running:
            ticket = self._waiting.popleft()
            works += ticket.works
            self._running.update(dict.fromkeys(ticket.rollout_ids, ticket))
        if works:
            self._engine.submit(works)

    def _told(self, finished: Sequence[Rollout]) -> None:
        for rollout in finished:
            self._tally.count(rollout)
            self._untaken = True
            self._pause_s = None if self._learner is None else GRACE_S
            ticket = self._running.pop(rollout.rollout_id, None)
            if ticket is not None:
                self._turnover.note()
                self._tell_end(ticket, rollout)
        streamed = frozenset(i for i, ticket in self._running.items() if ticket.asked.stream)
        for partial in self._engine.peek(streamed) if streamed else ():
            self._tell_more(self._running[partial.rollout_id], partial)

    def _tell_more(self, ticket: Ticket, partial: PartialRollout) -> None:
        told = ticket.told.get(partial.index, 0)
        if len(partial.response_ids) > told:
            ticket.told[partial.index] = len(partial.response_ids)
            new = partial.response_ids[told:], partial.rollout_logprobs[told:]
            ticket.tell(Increment(partial.index, *new, self.versions))

    def _tell_end(self, ticket: Ticket, rollout: Rollout) -> None:
        assert len(rollout.policy_versions) == 1, f"an answer of several loads: {rollout.policy_versions}"
        told = ticket.told.get(rollout.index, 0)
        new = tuple(rollout.response_ids[told:]), tuple(rollout.rollout_logprobs[told:])
        end = rollout.finish_reason, rollout.acceptance
        ticket.tell(Increment(rollout.index, *new, self.versions, *end))

    def _load(self, swap: _Swap) -> None:
        try:
            self._adopt(swap.weights)
        except WeightError as error:
            swap.done(error)
            return
        swap.done(None)

    def _adopt(self, weights: ModelWeights) -> None:
        """Both or none: a policy that is refused leaves the drafter of the one before."""
        before = self._current
        if weights.drafter is None and before is not None and before.drafter is not None:
            raise WeightError("these weights come without a drafter, and the engine has one: give both")
        if weights.drafter is not None:
            self._engine.load_drafter(next(self._loads), weights.drafter)
        try:
            self._engine.load_policy(next(self._loads), weights.policy)
        except WeightError:
            if before is not None and before.drafter is not None:
                self._engine.load_drafter(next(self._loads), before.drafter)
            raise
        self._after_load()
        self._current = weights
        self._tally.swaps += before is not None
        self._begin_learning(weights)

    # -- learning from what is served

    def _begin_learning(self, weights: ModelWeights) -> None:
        if self._learner is None:
            return
        versions = weights.versions
        assert weights.drafter is not None and versions.policy is not None and versions.drafter is not None
        self._engine.take_states(0)  # of the policy before
        self._learner.begin(versions.policy, weights.policy, NewDrafter(versions.drafter, weights.drafter))
        self._pause_s = GRACE_S

    def _learn(self, learner: Learner) -> None:
        """Serving does not end with it: a learner that finds no memory is let go."""
        try:
            if self._untaken:
                self._untaken = False
                learner.add(self._engine.take_states(0)[1])
            spare = learner.work()
        except torch.OutOfMemoryError as error:
            LOG.error("no memory to learn from what is served, which ends: lower drafter.pack_tokens (%s)", error)
            self._learner, self._pause_s = None, None
            learner.close()
            return
        if spare.found is not None:
            self._take_over(spare.found)
        self._pause_s = 0.0 if spare.more else REST_S

    def _take_over(self, found: NewDrafter) -> None:
        """While nothing runs: a swap of the drafter alone."""
        assert self._current is not None and not self._running
        self._engine.load_drafter(next(self._loads), found.tensors)
        self._after_load()
        versions = ServedVersions(self._current.versions.policy, found.version)
        self._current = replace(self._current, versions=versions, drafter=found.tensors)
        self._tally.swaps += 1
        LOG.info("serving %s", versions)

    def _end(self, reason: ServiceLostError) -> None:
        with self._changed:
            self._ended = reason
            tickets, swaps = list(self._open), list(self._swaps)
        for ticket in tickets:
            ticket.tell(reason)
        for swap in swaps:
            swap.done(reason)
