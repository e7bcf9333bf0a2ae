from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from actors.garbage import MANY, CollectBetweenSteps


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


def test_a_phase_is_not_interrupted_and_its_garbage_goes_with_the_step(collector: CollectBetweenSteps) -> None:
    seen = weakref.ref(Ring())
    looks = [g["collections"] for g in gc.get_stats()]
    kept = [[n] for n in range(100_000)]
    collector.progress(None)
    assert kept and [g["collections"] for g in gc.get_stats()] == looks and seen() is not None, "no look at all"
    collector.step(None)
    assert seen() is None


def test_a_flood_is_collected_in_between(collector: CollectBetweenSteps) -> None:
    seen = weakref.ref(Ring())
    kept = [list[int]() for _ in range(MANY)]
    assert kept and seen() is None
