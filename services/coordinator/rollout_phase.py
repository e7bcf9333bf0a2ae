"""One rollout phase: prompt groups go to servers, finished groups come out, idle slots train the drafter.

Each ready server with work has exactly one `advance` outstanding, of about `advance_budget_s`, longer where so many
servers work that their answers would be more than the coordinator can deal with, by what they have cost it so far.
Whenever any call is answered the phase looks again: give out queued work, release slots that have none, start or stop
drafting, move the last rollouts of a server to another one when the drafter wants its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from services.coordinator import scheduler
from services.coordinator.appointments import Appointments
from services.coordinator.calls import AT_ONCE, LOOK_S, Calls
from services.coordinator.cores import Cores
from services.coordinator.drafting import Drafting
from services.coordinator.effort import Effort
from services.coordinator.fleet import Fleet
from services.coordinator.leases import LeaseBook
from services.coordinator.ledger import FinishedGroup, Ledger
from services.coordinator.progress import ProgressBoard
from services.coordinator.scheduler import Pace, Slots, SlotView
from services.coordinator.strategies import StrategyLog
from services.coordinator.tail_moves import TailMoves
from services.coordinator.telemetry.facts import Telemetry
from services.coordinator.trainers import Trainers
from services.core.protocols import Clock
from services.core.types import GroupWork, RunEvent, ServerReport, SlotState

# So many servers are given work between two looks at the answers: a thousand that begin together would otherwise hold
# up those that report first, for seconds.
GIVEN_AT_ONCE = AT_ONCE // 2


class RolloutPhase:
    """Reused for every phase of a run. `max_running` is a server's capacity in rollouts."""

    def __init__(
        self,
        fleet: Fleet,
        trainers: Trainers,
        drafting: Drafting,
        leases: LeaseBook,
        calls: Calls,
        clock: Clock,
        board: ProgressBoard,
        max_running: int,
        pace: Pace,
        call_timeout_s: float,
        tail: TailMoves,
        telemetry: Telemetry,
        strategies: StrategyLog,
        tell: Callable[[str, str, str], RunEvent],
        cores: Cores | None,
    ) -> None:
        self._fleet = fleet
        self._trainers = trainers
        self._drafting = drafting
        self._tail = tail
        self._telemetry = telemetry
        self._strategies = strategies
        self._tell = tell
        self._cores = cores
        self._leases = leases
        self._calls = calls
        self._clock = clock
        self._board = board
        self._max_running = max_running
        self._appointments = Appointments(pace, clock)
        self._timeout_s = call_timeout_s
        self._ledger = Ledger([])
        self._seen = Slots()
        self._answered_s: dict[int, float] = {}  # slot: when the answer came whose server has no new order yet
        self._advancing: dict[int, frozenset[tuple[str, int]]] = {}  # slot: what its server had when it was asked
        self._planned: dict[int, list[GroupWork]] = {}  # what servers are given next, by slot
        self._effort = Effort(clock, lambda: calls.waited_s)
        self._states_step: int | None = None
        # slots whose server was asked for its states in this phase, and those that have not answered yet
        self._collected: set[int] = set()
        self._collecting: set[int] = set()
        fleet.on_lost = self._slot_lost

    def generate(
        self, works: Sequence[GroupWork], drafters: int, states_step: int | None = None
    ) -> Iterator[FinishedGroup]:
        """Yield each group as its last rollout finishes. So many idle slots may train the drafter meanwhile; at the end
        they are asked to stop, and nobody waits for that. With `states_step` a server that has run dry hands over the
        hidden states it kept before its slot is idle, so that the drafter learns from this step's early responses while
        the late ones are generated.

        Raises ServiceLostError when no server is left.
        """
        ledger = self._ledger = Ledger(works)
        self._seen = Slots(self._view(slot) for slot in range(len(self._leases)))
        self._answered_s.clear()
        self._appointments.begin()
        self._effort.begin()
        self._planned = {}
        self._tail.begin(ledger)
        self._states_step, self._collected = states_step, set()
        self._fleet.renew_ready()
        while not ledger.complete:
            self._fleet.require_some()
            self._give_out()
            self._draft(drafters)
            self._consolidate(drafters)
            self._advance()
            yield from ledger.take_finished()  # after the orders: no server waits for what becomes of the groups
            self._calls.turn(0.0 if self._planned else LOOK_S)
            self._fleet.expire()
        yield from ledger.take_finished()
        while self._collecting:  # an answer that is dropped would be states that nobody has any more
            self._calls.turn()
            self._fleet.expire()
        ledger.check_integrity()
        self._strategies.close()
        self._drafting.stop_all()
        self._fleet.release_all()
        self._advancing.clear()

    # ------------------------------------------------------------------ what the scheduler decided

    def _views(self) -> Slots:
        """Of all slots; only those are looked at again that something happened to since the last call, because there
        may be thousands and each answer leads here."""
        for part in (self._leases, self._ledger, self._fleet, self._trainers):
            for slot in part.touched:
                self._seen.put(self._view(slot))
            part.touched.clear()
        return self._seen

    def _view(self, slot: int) -> SlotView:
        return SlotView(
            slot=slot,
            state=self._leases.state(slot),
            outstanding=self._ledger.outstanding(slot),
            serves=self._fleet.ready(slot),
            can_draft=self._trainers.is_up(slot),
        )

    def _give_out(self) -> None:
        pending = self._ledger.pending
        if pending and not self._planned:
            self._plan(pending)
        for slot in list(islice(self._planned, GIVEN_AT_ONCE)):
            works = [work for work in self._planned.pop(slot) if self._ledger.queues(work)]
            if works and self._takes_work(slot):  # else it waits for the next plan
                self._submit(slot, works)
        self._drain_and_release()

    def _plan(self, pending: Sequence[GroupWork]) -> None:
        """For all servers at once, and anew only when all have theirs: it takes a look at each slot and group."""
        for slot in scheduler.slots_to_wake(pending, self._views(), self._max_running):
            self._fleet.open(slot)
        for choice in scheduler.hand_out(pending, self._views(), self._max_running):
            self._planned.setdefault(choice.slot, []).append(choice.work)

    def _takes_work(self, slot: int) -> bool:
        views = self._views()
        return slot in views.accepting and views[slot].serves

    def _submit(self, slot: int, works: Sequence[GroupWork]) -> None:
        if self._leases.state(slot) is SlotState.DRAINING:
            self._change(slot, SlotState.ROLLOUT)
        for work in works:
            self._ledger.assign(work, slot)
        if slot not in self._advancing:
            self._advance_one(slot, works)
            return
        client, epoch = self._fleet.client(slot), self._leases[slot].epoch
        pending = client.submit(works, epoch)
        self._calls.post(
            client.name,
            pending,
            lambda _: self._leases.renew(slot, epoch, self._clock()),
            lambda reason: self._fleet.lose(slot, reason),
            self._timeout_s,
        )

    def _drain_and_release(self) -> None:
        pending, views = self._ledger.pending, self._views()
        for slot in scheduler.slots_to_release(pending, views):
            # A server that is still opening, or whose last answer is on its way, is not idle yet.
            answered = not self._calls.outstanding(self._fleet.client(slot).name)
            if not (self._fleet.ready(slot) and answered) or self._tail.receives(slot):
                continue
            if self._states_step is not None and slot not in self._collected:
                self._collect(slot, self._states_step)
                continue
            self._fleet.release(slot)
            self._board.forget(self._fleet.client(slot).name)  # what it told last may run elsewhere now
        for slot in scheduler.slots_to_drain(pending, views):
            self._change(slot, SlotState.DRAINING)

    def _collect(self, slot: int, step: int) -> None:
        self._collected.add(slot)
        self._collecting.add(slot)
        self._fleet.collect(slot, step, self._trainers.add_chunk, lambda: self._collecting.discard(slot))

    def _draft(self, wanted: int) -> None:
        pending, views = self._ledger.pending, self._views()
        room = len(self._leases) if self._cores is None else self._cores.trainers(len(views.generating))
        self._drafting.stop(scheduler.slots_to_preempt(pending, views, self._max_running, room))
        can_train = self._trainers.newest is not None and self._drafting.live is not None
        for slot in scheduler.slots_to_draft(pending, views, can_train, min(wanted, room)):
            self._drafting.start(slot)

    def _consolidate(self, drafters: int) -> None:
        """Free servers in the tail while the drafter could train in more slots than are free or train already."""
        taken = self._leases.count(SlotState.IDLE, SlotState.DRAFTING)
        if self._trainers.newest is not None and drafters > taken:
            self._tail.consider(drafters - taken, self._trainers.is_up)

    # ------------------------------------------------------------------ one outstanding `advance` per server with work

    def _advance(self) -> None:
        for slot in sorted(self._views().working.difference(self._advancing)):
            self._advance_one(slot)

    def _advance_one(self, slot: int, works: Sequence[GroupWork] = ()) -> None:
        """`works`: what its server is given with that."""
        client, epoch = self._fleet.client(slot), self._leases[slot].epoch
        self._advancing[slot] = self._ledger.held(slot)
        budget_s = self._tail.shortened(slot, self._stretch_s())
        order = client.submit_and_advance(works, budget_s, epoch) if works else client.advance(budget_s, epoch)
        self._calls.post(
            client.name,
            order,
            lambda report: self._reported(slot, epoch, report),
            lambda reason: self._fleet.lose(slot, reason),
            self._timeout_s,
        )
        answered_s = self._answered_s.pop(slot, None)
        if answered_s is not None:
            self._telemetry.decided(self._clock() - answered_s)

    def _stretch_s(self) -> float:
        servers = len(self._views().working) + len(self._planned)
        return self._appointments.stretch_s(servers, self._effort.answer_s)

    def _reported(self, slot: int, epoch: int, report: ServerReport) -> None:
        self._effort.reported()
        asked = self._advancing.pop(slot)
        self._answered_s[slot] = self._calls.answered_s
        self._leases.renew(slot, epoch, self._clock())
        self._fleet.check_versions(slot, report.versions)
        for rollout in report.finished:
            self._ledger.record(rollout, slot)
        if not (report.running or report.waiting):
            self._missing(slot, asked)
        self._tail.report(slot, report)
        self._telemetry.reported(slot, report)
        self._strategies.reported(slot, report)
        self._board.rollouts_done = self._ledger.recorded
        self._board.report(self._fleet.client(slot).name, report)

    def _missing(self, slot: int, asked: frozenset[tuple[str, int]]) -> None:
        """The server has nothing left, so what it was given before it was asked and has not told is lost there: in an
        answer that never came, for one. Without this the phase would wait for it for ever."""
        lost = self._ledger.give_up(slot, asked)
        if lost:
            name = self._fleet.client(slot).name
            self._tell(
                "rollouts_missing", name, f"{lost} rollouts are unknown to their server: they are generated again"
            )

    def _slot_lost(self, slot: int) -> None:
        self._collecting.discard(slot)
        self._advancing.pop(slot, None)
        self._answered_s.pop(slot, None)
        self._board.forget(self._fleet.client(slot).name)
        self._drafting.slot_lost(slot)
        self._tail.slot_lost(slot)
        self._ledger.lose(slot)

    def _change(self, slot: int, state: SlotState) -> None:
        self._leases.change(slot, state, self._leases[slot].epoch, self._clock())
