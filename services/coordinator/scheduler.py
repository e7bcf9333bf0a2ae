"""Decisions, and nothing but decisions: views in, choices out. No clock, no calls, no state.

Two questions are answered here: which server gets which prompt group, and which slots train the drafter. There may be
thousands of slots and each answer of a server asks again, so that views are kept by what is asked of them (`Slots`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.core.types import GroupWork, SlotState


@dataclass(frozen=True, slots=True)
class SlotView:
    """What the scheduler knows about a slot. `outstanding` counts rollouts given to its server and not returned;
    `serves` and `can_draft` say whether server and drafter trainer are alive and loaded."""

    slot: int
    state: SlotState
    outstanding: int
    serves: bool
    can_draft: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    slot: int
    work: GroupWork


ACCEPTS_WORK = frozenset({SlotState.ROLLOUT, SlotState.DRAINING})
BUSY = 0.5  # the part of the coordinator's time that reports may take


class Slots:
    """The newest view of every slot, and the sets of slots that decisions start from. `accepting`: the server holds the
    slot; of those, `generating` have rollouts that are not done, `dry` have none. `working`: a ready server has work.
    `filled`: has work and may be given more."""

    def __init__(self, views: Iterable[SlotView] = ()) -> None:
        self._views: dict[int, SlotView] = {}
        self.accepting, self.generating, self.dry = set[int](), set[int](), set[int]()
        self.idle, self.training = set[int](), set[int]()
        self.working, self.filled = set[int](), set[int]()
        for view in views:
            self.put(view)

    def __getitem__(self, slot: int) -> SlotView:
        return self._views[slot]

    def put(self, view: SlotView) -> None:
        self._views[view.slot] = view
        for members, belongs in self._rules(view):
            (members.add if belongs else members.discard)(view.slot)

    def _rules(self, view: SlotView) -> tuple[tuple[set[int], bool], ...]:
        accepts, has_work = view.state in ACCEPTS_WORK, view.outstanding > 0
        return (
            (self.accepting, accepts),
            (self.generating, accepts and has_work),
            (self.dry, accepts and not has_work),
            (self.idle, view.state is SlotState.IDLE),
            (self.training, view.state is SlotState.DRAFTING),
            (self.working, view.serves and has_work),
            (self.filled, view.state is SlotState.ROLLOUT and has_work),
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """How often servers report. `stretch_s`: how long one generates before it does; `reports_per_s`: of all together at
    most, for which stretches get longer with the number of servers, up to `longest_s`. `answer_s` of `of`: what a
    report costs the coordinator, which is to be busy with reports for a part BUSY of its time at most: beyond that they
    queue, and every server would wait for the queue instead of generating."""

    stretch_s: float
    reports_per_s: float
    longest_s: float

    def of(self, servers: int, answer_s: float = 0.0) -> float:
        """The stretch of each while so many have work."""
        apart_s = max(1 / self.reports_per_s, answer_s / BUSY)
        return max(self.stretch_s, min(servers * apart_s, self.longest_s))


def hand_out(pending: Sequence[GroupWork], slots: Slots, max_running: int) -> list[Assignment]:
    """Give queued work to servers, one prompt group at a time, always to the least loaded one that has room.

    Least loaded first keeps the loads within one group of each other, so no server is left without work while
    another holds more than its fair share; what fits nowhere stays queued, ready for whoever frees a place first.
    A server that is still opening has its share kept for it. Order is kept: the first piece that does not fit ends
    the round, so a full group cannot starve behind small ones.
    """
    return [a for a in _place(pending, slots, max_running) if slots[a.slot].serves]


def slots_to_wake(pending: Sequence[GroupWork], slots: Slots, max_running: int) -> list[int]:
    """IDLE slots whose server should come back because queued work is left over for it."""
    return sorted(slots.idle)[: _left_over(pending, slots, max_running)] if slots.idle else []


def _left_over(pending: Sequence[GroupWork], slots: Slots, max_running: int) -> int:
    return len(pending) - len(_place(pending, slots, max_running))


def _place(pending: Sequence[GroupWork], slots: Slots, max_running: int) -> list[Assignment]:
    if not pending:
        return []  # mostly: no answer of a thousand servers is worth a look at all of them
    loads = [(slots[slot].outstanding, slot) for slot in slots.accepting]
    heapq.heapify(loads)  # least loaded first, of those alike the lowest slot
    placed: list[Assignment] = []
    for work in pending:
        if not loads or loads[0][0] + len(work.indices) > max_running:
            break
        load, slot = loads[0]
        heapq.heapreplace(loads, (load + len(work.indices), slot))
        placed.append(Assignment(slot, work))
    return placed


def slots_to_release(pending: Sequence[GroupWork], slots: Slots) -> list[int]:
    """Serving slots with nothing queued for them and nothing running in them: they turn IDLE."""
    return [] if pending else sorted(slots.dry)


def slots_to_drain(pending: Sequence[GroupWork], slots: Slots) -> list[int]:
    """Slots whose servers are on their last work: nothing more waits for them."""
    return [] if pending else sorted(slots.filled)


def slots_to_draft(pending: Sequence[GroupWork], slots: Slots, has_data: bool, wanted: int) -> list[int]:
    """The IDLE slots that should join drafter training now, so that `wanted` train in all: only while no work waits
    and another slot still generates."""
    more = wanted - len(slots.training)
    if pending or not has_data or not slots.generating or more <= 0:
        return []
    return [slot for slot in sorted(slots.idle) if slots[slot].can_draft][:more]


def slots_to_preempt(pending: Sequence[GroupWork], slots: Slots, max_running: int, room: int) -> list[int]:
    """Training slots that yield at their next micro-step: all when nothing generates any more, else as many as queued
    work needs beyond the IDLE ones, or as are more than there is `room` for."""
    if not pending and not slots.generating:
        return sorted(slots.training)
    needed = _left_over(pending, slots, max_running) - len(slots.idle) if slots.training else 0
    count = max(needed, len(slots.training) - room)
    return sorted(slots.training)[:count] if count > 0 else []
