from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from actors.garbage import MIDDLE, YOUNG, CollectBetweenSteps


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[CollectBetweenSteps]:
    before = gc.get_threshold()
    yield CollectBetweenSteps()
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_grew_old_in_a_phase_is_collected_with_its_step(collector: CollectBetweenSteps) -> None:
    ring = Ring()
    seen = weakref.ref(ring)
    gc.collect(1)  # it is among the old now
    del ring
    looks = gc.get_stats()[2]["collections"]
    kept = [[n] for n in range(2 * YOUNG * MIDDLE)]
    collector.progress(None)
    assert kept and gc.get_stats()[2]["collections"] == looks and seen() is not None, "no look at all in a phase"
    collector.step(None)
    assert seen() is None


def test_the_young_are_collected_in_between(collector: CollectBetweenSteps) -> None:
    seen = weakref.ref(Ring())
    kept = [[n] for n in range(2 * YOUNG)]
    assert kept and seen() is None
