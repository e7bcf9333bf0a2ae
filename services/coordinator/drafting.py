"""The drafter loop: train in one idle slot at a time, keep the state safe, publish what was learned.

The training state (`live`) lives outside the trainers as a reference: a slot adopts it with `begin`, trains in short
`train` calls, and hands it back with `snapshot`. So it moves between slots, and a killed trainer costs at most what
it learned since the last snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from services.coordinator.calls import Calls
from services.coordinator.fleet import PROBE_PAUSE_S, Fleet, Patience, Published
from services.coordinator.leases import LeaseBook
from services.core.errors import ServiceLostError
from services.core.protocols import Blob, Clock, DrafterClient, Pending
from services.core.types import AcceptanceEstimate, DrafterProgress, HiddenStateChunk, RunEvent, SlotState

# A snapshot costs one copy of the drafter and its optimizer state; this many `train` calls between two of them keep
# that small and the loss after a kill to a few seconds of training.
SNAPSHOT_EVERY = 20


class Drafting:
    """`initial` is the state of drafter version 0; a frozen reference to it is kept for comparison."""

    def __init__(
        self,
        trainers: Sequence[DrafterClient],
        initial: Blob | None,
        fleet: Fleet,
        leases: LeaseBook,
        calls: Calls,
        clock: Clock,
        patience: Patience,
        tell: Callable[[str, str, str], RunEvent],
        train: bool,
        budget_s: float,
        buffer_bytes: int,
    ) -> None:
        self.trainers = tuple(trainers)
        self._frozen = self._live = initial
        self._fleet = fleet
        self._leases = leases
        self._calls = calls
        self._clock = clock
        self._patience = patience
        self._tell = tell
        self._train = train
        self._budget_s = budget_s
        self._buffer_bytes = buffer_bytes
        self._up = set(range(len(self.trainers)))
        self._chunks: deque[tuple[HiddenStateChunk, Blob]] = deque()
        self._head: Published | None = None
        self.slot: int | None = None  # the slot that trains now
        self.last: int | None = None  # the slot that trained last
        self._stopping = False
        self._since_snapshot = 0
        self._dirty = False
        self._pids: dict[int, int] = {}
        self.progress: list[DrafterProgress] = []
        self.estimates: list[AcceptanceEstimate] = []

    # ------------------------------------------------------------------ what trainers learn from

    @property
    def has_data(self) -> bool:
        return self._train and bool(self._chunks)

    def can_draft(self, slot: int) -> bool:
        return self._train and slot in self._up

    def adopt_head(self, policy: Published) -> None:
        """Send the published policy to every trainer, which takes embedding and LM head from it."""
        first, self._head = self._head is None, policy
        for slot in sorted(self._up):
            if first:
                self._post(slot, self.trainers[slot].process_id(), self._remember(slot))
            self._post(slot, self.trainers[slot].load_target_head(policy.version, policy.blob))

    def add_chunk(self, chunk: HiddenStateChunk, blob: Blob) -> None:
        """Send hidden states to every trainer, and keep the newest that fit the buffer for one that is restarted."""
        self._chunks.append((chunk, blob))
        while len(self._chunks) > 1 and sum(c.num_bytes for c, _ in self._chunks) > self._buffer_bytes:
            self._chunks.popleft()
        for slot in sorted(self._up):
            self._post(slot, self.trainers[slot].add_chunk(chunk, blob))

    def estimate(self) -> None:
        """Ask one trainer how well the live drafter and the frozen first one fit the newest chunk."""
        self.estimates = []
        if not (self._chunks and self._up) or self._live is None or self._frozen is None:
            return
        slot, newest = min(self._up), self._chunks[-1][1]
        states = {"live": self._live, "frozen": self._frozen}
        self._identified(
            slot, lambda: self._post(slot, self.trainers[slot].estimate(states, newest), self.estimates.extend)
        )

    def settle(self) -> None:
        """Wait until every live trainer has answered what it was asked."""
        while any(self._calls.outstanding(self.trainers[slot].name) for slot in self._up):
            self._calls.turn()

    # ------------------------------------------------------------------ training in an idle slot

    def start(self, slot: int) -> None:
        assert self.slot is None and self._live is not None
        live = self._live
        lease = self._leases.change(slot, SlotState.DRAFTING, self._leases[slot].epoch, self._clock())
        self.slot = self.last = slot
        self._stopping = False
        self._since_snapshot = 0
        trainer, epoch = self.trainers[slot], lease.epoch
        self._identified(slot, lambda: self._post(slot, trainer.begin(live, epoch), lambda _: self._next(slot, epoch)))

    def stop(self) -> None:
        """Ask the training slot to yield; the call under way ends with its micro-step."""
        self._stopping = True

    def finish(self) -> None:
        """Stop and wait until no slot trains."""
        self.stop()
        while self.slot is not None:
            self._calls.turn()
            self._fleet.expire()

    def _next(self, slot: int, epoch: int) -> None:
        self._leases.renew(slot, epoch, self._clock())
        if self._stopping:
            self._yield(slot, epoch)
            return
        pending = self.trainers[slot].train(self._budget_s, epoch)
        self._post(slot, pending, lambda progress: self._trained(slot, epoch, progress))

    def _trained(self, slot: int, epoch: int, progress: DrafterProgress) -> None:
        if progress.micro_steps:
            self.progress.append(progress)
            self._since_snapshot += 1
        else:
            self._stopping = True  # nothing to learn from
        if self._since_snapshot >= SNAPSHOT_EVERY and not self._stopping:
            self._snapshot(slot, epoch, self._next)
        else:
            self._next(slot, epoch)

    def _snapshot(self, slot: int, epoch: int, then: Callable[[int, int], None]) -> None:
        pending, state = self.trainers[slot].snapshot(epoch)

        def saved(_: int) -> None:
            self._live, self._dirty, self._since_snapshot = state, True, 0
            then(slot, epoch)

        self._post(slot, pending, saved)

    def _yield(self, slot: int, epoch: int) -> None:
        if self._since_snapshot:
            self._snapshot(slot, epoch, self._free)
        else:
            self._free(slot, epoch)

    def _free(self, slot: int, epoch: int) -> None:
        self._leases.change(slot, SlotState.IDLE, epoch, self._clock())
        self.slot = None

    # ------------------------------------------------------------------ publishing

    def publish(self) -> Published | None:
        """Export the live drafter as the next version, or None when it has learned nothing since the last one.

        A trainer lost during the export is an event; the next one is asked, and failing all, the next step.
        """
        for slot in sorted(self._up):
            if not self._dirty or self._live is None:
                return None
            published = self._export(slot, self._live, 1 + (self._fleet.expected.drafter or 0))
            if published is not None:
                self._dirty = False
                return published
        return None

    def publish_first(self) -> Published | None:
        """Export drafter version 0; None without drafter trainers."""
        if not self.trainers or self._frozen is None:
            return None
        give_up_s = self._clock() + self._patience.restart_s
        while self._clock() < give_up_s:
            for slot in sorted(self._up):
                published = self._export(slot, self._frozen, 0)
                if published is not None:
                    return published
            self._calls.turn()
        names = ", ".join(t.name for t in self.trainers)
        raise ServiceLostError(names, f"no drafter trainer answered within {self._patience.restart_s:.0f} s")

    def _export(self, slot: int, state: Blob, version: int) -> Published | None:
        trainer = self.trainers[slot]
        pending, blob = trainer.export(state)
        try:
            self._calls.wait_for(trainer.name, pending, self._patience.call_s)
        except ServiceLostError as error:
            self.lose(slot, error.reason)
            return None
        return Published(version, blob)

    # ------------------------------------------------------------------ losing and getting back

    def lose(self, slot: int, reason: str) -> None:
        """A trainer died or fell silent. If it held its slot, the slot is lost too, until its server answers."""
        if slot not in self._up:
            return
        trainer = self.trainers[slot]
        self._calls.drop(trainer.name)
        self._up.discard(slot)
        self._tell("drafter_lost", trainer.name, f"drafter trainer of slot {slot} is lost: {reason}")
        if self.slot == slot:
            self.slot = None
            self._fleet.lose(slot, f"its drafter trainer is lost: {reason}")
        self._probe(slot, self._clock() + self._patience.restart_s)

    def slot_lost(self, slot: int) -> None:
        """The fleet found the slot lost (its lease ran out): whoever trained there no longer holds it."""
        if self.slot == slot:
            self.slot = None
            self.lose(slot, "its slot's lease ran out")

    def _probe(self, slot: int, give_up_s: float) -> None:
        trainer = self.trainers[slot]

        def again(reason: str) -> None:
            if self._clock() < give_up_s:
                self._calls.later(PROBE_PAUSE_S, ask)
            else:
                self._tell("drafter_gone", trainer.name, f"did not come back: {reason}")

        def ask() -> None:
            left = max(1.0, give_up_s - self._clock())
            self._calls.post(trainer.name, trainer.process_id(), lambda pid: self._returned(slot, pid), again, left)

        ask()

    def _identified(self, slot: int, then: Callable[[], None]) -> None:
        """Go on once the trainer is known to be the process that was equipped; one that died and was restarted
        between two calls has neither head nor data, and gets them first."""

        def answered(process_id: int) -> None:
            if process_id != self._pids.get(slot):
                name = self.trainers[slot].name
                self._tell("drafter_lost", name, f"drafter trainer of slot {slot} was restarted between two calls")
                self._returned(slot, process_id)
            then()

        self._post(slot, self.trainers[slot].process_id(), answered)

    def _remember(self, slot: int) -> Callable[[int], None]:
        return lambda process_id: self._pids.update({slot: process_id})

    def _returned(self, slot: int, process_id: int) -> None:
        trainer = self.trainers[slot]
        self._up.add(slot)
        self._pids[slot] = process_id
        self._tell("drafter_returned", trainer.name, f"drafter trainer of slot {slot} is back, process {process_id}")
        if self._head is not None:
            self._post(slot, trainer.load_target_head(self._head.version, self._head.blob))
        for chunk, blob in self._chunks:
            self._post(slot, trainer.add_chunk(chunk, blob))

    def _post(self, slot: int, pending: Pending[Any], done: Callable[[Any], object] = lambda _: None) -> None:
        name = self.trainers[slot].name
        self._calls.post(name, pending, _quiet(done), lambda reason: self.lose(slot, reason), self._patience.call_s)


def _quiet(done: Callable[[Any], object]) -> Callable[[Any], None]:
    def call(answer: Any) -> None:
        done(answer)

    return call
