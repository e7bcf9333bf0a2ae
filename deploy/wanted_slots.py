"""Slot seconds in which drafter training has room, from the spans of a rollout phase."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from services.coordinator.cores import Cores
from services.coordinator.scheduler import ACCEPTS_WORK
from services.core.types import SlotSpan, SlotState

GENERATING = frozenset(state.value for state in ACCEPTS_WORK)
FREE = frozenset({SlotState.IDLE.value, SlotState.DRAFTING.value})


def wanted_slot_s(spans: Sequence[SlotSpan], start_s: float, end_s: float, cores: Cores | None) -> float:
    """Integral over [start_s, end_s] of the free slots, no more of them at a time than cores are left by the servers.
    `cores` None: every slot has its own."""
    cuts = sorted({start_s, end_s, *(t for s in spans for t in (s.start_s, s.end_s) if start_s < t < end_s)})
    return sum(
        (b - a) * _wanted([s for s in spans if s.start_s <= a and b <= s.end_s], cores) for a, b in pairwise(cuts)
    )


def _wanted(now: Sequence[SlotSpan], cores: Cores | None) -> int:
    free = sum(s.role in FREE for s in now)
    return free if cores is None else min(free, cores.trainers(sum(s.role in GENERATING for s in now)))
