"""Decisions, and nothing but decisions: views in, choices out. No clock, no calls, no state.

Two questions are answered here: which server gets which prompt group, and which slots train the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def hand_out(pending: Sequence[GroupWork], slots: Sequence[SlotView], max_running: int) -> list[Assignment]:
    """Give queued work to servers, one prompt group at a time, always to the least loaded one that has room.

    Least loaded first keeps the loads within one group of each other, so no server is left without work while
    another holds more than its fair share; what fits nowhere stays queued, ready for whoever frees a place first.
    A server that is still opening has its share kept for it. Order is kept: the first piece that does not fit ends
    the round, so a full group cannot starve behind small ones.
    """
    ready = {v.slot for v in slots if v.serves}
    return [a for a in _place(pending, slots, max_running) if a.slot in ready]


def slots_to_wake(pending: Sequence[GroupWork], slots: Sequence[SlotView], max_running: int) -> list[int]:
    """IDLE slots whose server should come back because queued work is left over for it."""
    return [v.slot for v in slots if v.state is SlotState.IDLE][: _left_over(pending, slots, max_running)]


def _left_over(pending: Sequence[GroupWork], slots: Sequence[SlotView], max_running: int) -> int:
    return len(pending) - len(_place(pending, slots, max_running))


def _place(pending: Sequence[GroupWork], slots: Sequence[SlotView], max_running: int) -> list[Assignment]:
    load = {v.slot: v.outstanding for v in slots if v.state in ACCEPTS_WORK}
    placed: list[Assignment] = []
    for work in pending:
        slot = min(load, key=lambda s: (load[s], s), default=None)
        if slot is None or load[slot] + len(work.indices) > max_running:
            break
        load[slot] += len(work.indices)
        placed.append(Assignment(slot, work))
    return placed


def slots_to_release(pending: Sequence[GroupWork], slots: Sequence[SlotView]) -> list[int]:
    """Serving slots with nothing queued for them and nothing running in them: they turn IDLE."""
    if pending:
        return []
    return [v.slot for v in slots if v.state in ACCEPTS_WORK and v.outstanding == 0]


def generating(slots: Sequence[SlotView]) -> int:
    """Servers with rollouts that are not done."""
    return sum(v.state in ACCEPTS_WORK and v.outstanding > 0 for v in slots)


def slots_to_draft(pending: Sequence[GroupWork], slots: Sequence[SlotView], has_data: bool, wanted: int) -> list[int]:
    """The IDLE slots that should join drafter training now, so that `wanted` train in all: only while no work waits
    and another slot still generates."""
    if pending or not has_data or not generating(slots):
        return []
    training = sum(v.state is SlotState.DRAFTING for v in slots)
    free = [v.slot for v in slots if v.state is SlotState.IDLE and v.can_draft]
    return free[: max(0, wanted - training)]


def slots_to_preempt(pending: Sequence[GroupWork], slots: Sequence[SlotView], max_running: int, room: int) -> list[int]:
    """Training slots that yield at their next micro-step: all when nothing generates any more, else as many as queued
    work needs beyond the IDLE ones, or as are more than there is `room` for."""
    training = [v.slot for v in slots if v.state is SlotState.DRAFTING]
    if not pending and not generating(slots):
        return training
    idle = sum(v.state is SlotState.IDLE for v in slots)
    return training[: max(0, _left_over(pending, slots, max_running) - idle, len(training) - room)]
