"""Spans of the slot timeline: they tile the run, and none outlasts its phase."""

from __future__ import annotations

from services.coordinator.leases import LeaseBook
from services.coordinator.timeline import Timeline
from services.core.types import SlotSpan, SlotState


def test_spans_tile_the_run_and_end_with_their_phase() -> None:
    now, spans = [0.0], list[SlotSpan]()
    timeline = Timeline(2, lambda: now[0], spans.append)
    leases = LeaseBook(2, 30.0, 0.0, timeline.slot_changed)
    for step in (1, 2):
        timeline.enter(f"step {step}")
        now[0] += 1.0
        for slot in (0, 1):
            state = SlotState.ROLLOUT if step == 1 else SlotState.IDLE
            leases.change(slot, state, leases[slot].epoch, now[0])
        now[0] += 2.0
    timeline.close()
    for slot in ("slot 0", "slot 1"):
        mine = [s for s in spans if s.slot == slot]
        assert [(s.start_s, s.end_s) for s in mine] == [(0, 1), (1, 3), (3, 4), (4, 6)]
        assert [s.label for s in mine] == ["step 1", "step 1", "step 2", "step 2"]
