"""Carrying out what `consolidation` decides: withdraw the rollouts of one server, submit them to another.

    decide ── withdraw ──> source hands back what there is (or is lost: its rollouts begin again from their seeds)
                             └── submit ──> destination goes on (or is lost: they go on elsewhere from what was kept)

From the answer of the source on the ledger keeps every partial, so no loss costs more than one stretch of work. One
round of moves at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from services.config.schema import ConsolidateConfig
from services.coordinator.calls import Calls
from services.coordinator.consolidation import Move, ServerTail, TailRequest, Terms, decide
from services.coordinator.fleet import Fleet
from services.coordinator.leases import SERVING, LeaseBook
from services.coordinator.ledger import Ledger
from services.coordinator.rates import RateBook
from services.core.protocols import Clock
from services.core.types import GroupWork, PartialRollout, RunEvent, RunningRequest, ServerReport

# While rollouts are on their way to a server it is asked for so much shorter stretches, so that they need not wait for
# the end of a long one. The source generates until it hands them back: they stand still for about one short stretch,
# and as much again is granted to the way.
SHORT = 0.1


class TailMoves:
    """`capacity`: rollouts that a server can run."""

    def __init__(
        self,
        config: ConsolidateConfig,
        fleet: Fleet,
        leases: LeaseBook,
        calls: Calls,
        clock: Clock,
        tell: Callable[[str, str, str], RunEvent],
        capacity: int,
        advance_budget_s: float,
        call_timeout_s: float,
    ) -> None:
        self._enabled = config.enabled
        self._terms = Terms(config.max_delay, config.min_freed_s, config.worth, 2 * SHORT * advance_budget_s)
        self._fleet, self._leases, self._calls, self._clock = fleet, leases, calls, clock
        self._tell, self._capacity, self._timeout_s = tell, capacity, call_timeout_s
        self._rates = RateBook()
        self.begin(Ledger([]))

    def begin(self, ledger: Ledger) -> None:
        """A phase begins: what servers did in the last one is over, what their tokens cost stays known."""
        self._ledger = ledger
        self._running: dict[int, tuple[RunningRequest, ...]] = {}  # by slot, of the last report without waiting work
        self._under_way: dict[int, Move] = {}  # by source
        self._moved: set[str] = set()
        self._news = False

    def report(self, slot: int, report: ServerReport) -> None:
        self._rates.note(slot, report)
        self._running.pop(slot, None)
        if not report.waiting:
            self._running[slot] = report.running
        self._news = True

    def slot_lost(self, slot: int) -> None:
        self._under_way.pop(slot, None)
        self._running.pop(slot, None)

    def receives(self, slot: int) -> bool:
        """Rollouts are on their way to this slot's server: it is not idle although it may have nothing yet."""
        return any(move.destination == slot for move in self._under_way.values())

    def shortened(self, slot: int, stretch_s: float) -> float:
        """How long a server may generate before it looks for messages again, of what it would otherwise."""
        return stretch_s * (SHORT if self.receives(slot) else 1.0)

    def consider(self, wanted: int, useful: Callable[[int], bool]) -> None:
        """Free up to `wanted` slots, of those that are `useful` free, if that is worth it. Looks once per report, and
        begins a move when the destination has just reported: from then on it listens."""
        if not (self._enabled and wanted and self._news) or self._under_way or self._ledger.pending:
            return
        self._news = False
        servers = self._tails(useful)
        for move in decide(servers, self._rates, self._terms, wanted) if servers else ():
            if not self._calls.outstanding(self._fleet.client(move.destination).name):
                self._withdraw(move)

    def _tails(self, useful: Callable[[int], bool]) -> list[ServerTail]:
        """What every server runs, or nothing as long as that is not known of each."""
        servers = []
        for slot in self._leases.in_state(*SERVING):
            open_ = self._ledger.outstanding(slot)
            running = self._running.get(slot, ())
            if open_:
                if len(running) != open_ or not self._fleet.ready(slot) or not self._rates.knows(slot):
                    return []
                requests = tuple(self._request(r) for r in running)
                servers.append(ServerTail(slot, requests, self._capacity, useful(slot)))
        return servers

    def _request(self, r: RunningRequest) -> TailRequest:
        work = self._ledger.work_of(r.rollout_id)
        assert work is not None, f"{r.rollout_id} runs and nobody asked for it"
        return TailRequest(
            rollout_id=r.rollout_id,
            num_prompt=len(work.prompt.token_ids),
            num_tokens=r.num_tokens,
            max_tokens=work.sampling.max_tokens,
            acceptance_length=r.acceptance.acceptance_length,
            moved=r.rollout_id in self._moved,
        )

    def _withdraw(self, move: Move) -> None:
        client, epoch = self._fleet.client(move.source), self._leases[move.source].epoch
        self._under_way[move.source] = move
        self._calls.post(
            client.name,
            client.withdraw(move.rollout_ids, epoch),
            lambda partials: self._withdrawn(move, epoch, partials),
            lambda reason: self._fleet.lose(move.source, reason),
            self._timeout_s,
        )

    def _withdrawn(self, move: Move, epoch: int, partials: tuple[PartialRollout, ...]) -> None:
        del self._under_way[move.source]
        self._leases.renew(move.source, epoch, self._clock())
        self._running.pop(move.source, None)
        self._moved.update(p.rollout_id for p in partials)
        there = move.destination
        room = self._ledger.outstanding(there) + len(partials) <= self._capacity
        works = self._ledger.move(partials, move.source, there if room and self._fleet.ready(there) else None)
        if works:
            self._submit(move, works, len(partials))

    def _submit(self, move: Move, works: list[GroupWork], count: int) -> None:
        there = move.destination
        client, epoch = self._fleet.client(there), self._leases[there].epoch
        self._running.pop(there, None)
        self._calls.post(
            client.name,
            client.submit(works, epoch),
            lambda _: self._leases.renew(there, epoch, self._clock()),
            lambda reason: self._fleet.lose(there, reason),
            self._timeout_s,
        )
        self._tell("tail_moved", self._fleet.client(move.source).name, _say(move, count, client.name))


def _say(move: Move, count: int, destination: str) -> str:
    return (
        f"{count} of its last rollouts go on at {destination}: this frees the slot for about {move.freed_s:.1f} s and "
        f"costs {move.cost_s:.1f} s; the phase was to end in {move.end_before_s:.1f} s, now in {move.end_after_s:.1f} s"
    )
