from __future__ import annotations

import pytest

from deploy.wanted_slots import wanted_slot_s
from services.coordinator.cores import Cores
from services.core.types import SlotSpan

# Four slots: one after the other runs dry; what is free trains from second 2 on.
SPANS = [
    SlotSpan("slot 0", "rollout", 0.0, 10.0, "a"),
    SlotSpan("slot 1", "draining", 0.0, 6.0, "a"),
    SlotSpan("slot 1", "idle", 6.0, 10.0, "a"),
    SlotSpan("slot 2", "rollout", 0.0, 2.0, "a"),
    SlotSpan("slot 2", "drafting", 2.0, 10.0, "a"),
    SlotSpan("slot 3", "lost", 0.0, 10.0, "a"),
]


def test_free_slots_count_as_far_as_there_are_cores_for_them() -> None:
    assert wanted_slot_s(SPANS, 0.0, 10.0, None) == pytest.approx(4 + 8)
    assert wanted_slot_s(SPANS, 0.0, 10.0, Cores(8, 1, 1)) == pytest.approx(4 + 8)
    assert wanted_slot_s(SPANS, 0.0, 10.0, Cores(2, 1, 1)) == pytest.approx(4)  # one trains beside slot 0 alone
    assert wanted_slot_s(SPANS, 0.0, 10.0, Cores(3, 1, 1)) == pytest.approx(4 + 2 * 4)


def test_only_the_window_counts() -> None:
    assert wanted_slot_s(SPANS, 5.0, 7.0, None) == pytest.approx(2 + 1)
