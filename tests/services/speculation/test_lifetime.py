from __future__ import annotations

import random

import pytest

from services.speculation.lifetime import Lifetime
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import OFF


def told(life: Lifetime, running: int) -> None:
    life.observe(RoundOutcome(OFF, RoundView(running, 10 * running), running, StageSeconds(0, 0, 1, 0)))


@pytest.mark.parametrize("mean", [20, 300])
def test_learns_the_mean_of_lengths_without_memory(mean: int) -> None:
    rng, life = random.Random(0), Lifetime()
    for _ in range(20):
        running = 64
        while running:
            told(life, running)
            running -= sum(rng.random() < 1 / mean for _ in range(running))
    assert life.tokens == pytest.approx(mean, rel=0.3)


def test_before_anything_ended_it_grows_with_what_was_seen() -> None:
    life = Lifetime()
    before = life.tokens
    for _ in range(1000):
        told(life, 4)
    assert life.tokens > 10 * before


def test_a_new_batch_is_no_end() -> None:
    life = Lifetime()
    told(life, 1)
    told(life, 64)
    assert life.tokens > 256
