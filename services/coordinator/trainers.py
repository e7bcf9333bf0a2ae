"""The drafter trainers as one body: who is up, what each needs to learn from, losing them and getting them back.

A trainer that was restarted, noticed or not, has neither head nor data; it gets both before it is asked for anything.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from services.coordinator.calls import Calls
from services.coordinator.fleet import GONE_PAUSE_S, PROBE_PAUSE_S, Patience, Published
from services.core.errors import BlobLostError, ServiceLostError
from services.core.protocols import Blob, Clock, DrafterClient, Pending
from services.core.types import HiddenStateChunk, RunEvent

T = TypeVar("T")


class Trainers:
    """`clients[i]` is the trainer of slot i. `on_lost(slot, reason)` is told of every loss."""

    def __init__(
        self,
        clients: Sequence[DrafterClient],
        calls: Calls,
        clock: Clock,
        patience: Patience,
        tell: Callable[[str, str, str], RunEvent],
        buffer_bytes: int,
        states_added: Callable[[HiddenStateChunk], None] = lambda chunk: None,
    ) -> None:
        self.clients = tuple(clients)
        self._calls = calls
        self._clock = clock
        self._patience = patience
        self._tell = tell
        self._buffer_bytes = buffer_bytes
        self._states_added = states_added
        self._up = set(range(len(self.clients)))
        self.losses = Counter[int]()  # of each slot's trainer
        self._sorted: list[int] | None = None  # `_up`, until it changes
        self.touched: set[int] = set()  # slots whose trainer came or went since whoever looks cleared it
        self._pids: dict[int, int] = {}
        self._chunks: deque[tuple[HiddenStateChunk, Blob]] = deque()
        self._head: Published | None = None
        self.on_lost: Callable[[int, str], None] = lambda slot, reason: None

    @property
    def up(self) -> list[int]:
        """Slots whose trainer is alive as far as anybody knows."""
        if self._sorted is None:
            self._sorted = sorted(self._up)
        return list(self._sorted)

    def is_up(self, slot: int) -> bool:
        return slot in self._up

    @property
    def newest(self) -> Blob | None:
        """The hidden states that came last: nobody has trained on them before the next rollout phase."""
        return self._chunks[-1][1] if self._chunks else None

    @property
    def chunks(self) -> tuple[HiddenStateChunk, ...]:
        """What a restarted trainer is equipped with, oldest first."""
        return tuple(chunk for chunk, _ in self._chunks)

    # ------------------------------------------------------------------ what they learn from

    def adopt_head(self, policy: Published) -> None:
        """Send the published policy to every trainer, which takes embedding and LM head from it."""
        first, self._head = self._head is None, policy
        for slot in self.up:
            if first:
                self.post(slot, self.clients[slot].process_id(), self._remember(slot))
            self.post(slot, self.clients[slot].load_target_head(policy.version, policy.blob))

    def add_chunk(self, chunk: HiddenStateChunk, blob: Blob) -> None:
        """Send hidden states to every trainer, and keep the newest that fit the buffer for one that is restarted."""
        self._states_added(chunk)
        self._chunks.append((chunk, blob))
        while len(self._chunks) > 1 and sum(c.num_bytes for c, _ in self._chunks) > self._buffer_bytes:
            self._chunks.popleft()
        for slot in self.up:
            self.post(slot, self.clients[slot].add_chunk(chunk, blob))

    # ------------------------------------------------------------------ asking

    def post(
        self,
        slot: int,
        pending: Pending[Any],
        done: Callable[[Any], object] = lambda _: None,
        gone: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`done` with the answer; whoever does not answer is lost. `gone` when the tensors in the question are."""
        name = self.clients[slot].name
        lost = partial(self.lose, slot)
        self._calls.post(name, pending, _quiet(done), lost, self._patience.call_s, gone=gone)

    def ask(self, slot: int, pending: Pending[T]) -> T | None:
        """The answer, other calls going on meanwhile; None when the trainer is lost, or the tensors in the question."""
        try:
            return self._calls.wait_for(self.clients[slot].name, pending, self._patience.call_s)
        except ServiceLostError as error:
            self.lose(slot, error.reason)
            return None
        except BlobLostError:
            return None

    def identified(self, slot: int, then: Callable[[], None]) -> None:
        """Go on once the trainer is known to be the process that was equipped."""

        def answered(process_id: int) -> None:
            if process_id != self._pids.get(slot):
                name = self.clients[slot].name
                self._tell("drafter_lost", name, f"drafter trainer of slot {slot} was restarted between two calls")
                self._returned(slot, process_id)
            then()

        self.post(slot, self.clients[slot].process_id(), answered)

    def recover(self) -> Blob | None:
        """The state with the most micro-steps that any trainer holds from an earlier coordinator's time. Whoever
        answers is known from then on."""
        found: list[tuple[int, Blob]] = []
        for slot in self.up:
            pending, state = self.clients[slot].held()
            total_steps = self.ask(slot, pending)
            if total_steps is not None and total_steps >= 0:
                found.append((total_steps, state))
        return max(found, key=lambda held: held[0])[1] if found else None

    def first_state(self) -> Blob:
        """What a run's drafter begins with, from the first trainer that answers. Raises ServiceLostError."""
        give_up_s = self._clock() + self._patience.restart_s
        while self._clock() < give_up_s:
            for slot in self.up:
                pending, state = self.clients[slot].initial_state()
                if self.ask(slot, pending) is not None:
                    return state
            self._calls.turn()
        names = ", ".join(c.name for c in self.clients)
        raise ServiceLostError(names, f"no drafter trainer answered within {self._patience.restart_s:.0f} s")

    def forget_chunks(self) -> None:
        """Whoever is restarted from now on learns from what comes."""
        self._chunks.clear()

    # ------------------------------------------------------------------ losing and getting back

    def lose(self, slot: int, reason: str) -> None:
        if slot not in self._up:
            return
        name = self.clients[slot].name
        self._calls.drop(name)
        self._up.discard(slot)
        self.losses[slot] += 1
        self._changed(slot)
        self._tell("drafter_lost", name, f"drafter trainer of slot {slot} is lost: {reason}")
        self.on_lost(slot, reason)
        self._probe(slot, self._clock() + self._patience.restart_s)

    def _probe(self, slot: int, give_up_s: float) -> None:
        trainer = self.clients[slot]
        gone: list[str] = []

        def again(reason: str) -> None:
            if self._clock() >= give_up_s and not gone:
                gone.append(reason)
                self._tell("drafter_gone", trainer.name, f"did not come back: {reason}")
            self._calls.later(GONE_PAUSE_S if gone else PROBE_PAUSE_S, ask)

        def ask() -> None:
            left = max(1.0, give_up_s - self._clock())
            self._calls.post(trainer.name, trainer.process_id(), lambda pid: self._returned(slot, pid), again, left)

        ask()

    def _changed(self, slot: int) -> None:
        self._sorted = None
        self.touched.add(slot)

    def _remember(self, slot: int) -> Callable[[int], None]:
        return lambda process_id: self._pids.update({slot: process_id})

    def _returned(self, slot: int, process_id: int) -> None:
        trainer = self.clients[slot]
        self._up.add(slot)
        self._changed(slot)
        self._pids[slot] = process_id
        self._tell("drafter_returned", trainer.name, f"drafter trainer of slot {slot} is back, process {process_id}")
        if self._head is not None:
            self.post(slot, trainer.load_target_head(self._head.version, self._head.blob))
        for chunk, blob in self._chunks:
            self.post(slot, trainer.add_chunk(chunk, blob))


def _quiet(done: Callable[[Any], object]) -> Callable[[Any], None]:
    def call(answer: Any) -> None:
        done(answer)

    return call
