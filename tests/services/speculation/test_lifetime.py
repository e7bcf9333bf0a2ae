from __future__ import annotations

import random

import pytest

from services.speculation.lifetime import Ends, Lifetime
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import OFF
from tests.services.speculation.rounds import chain


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


@pytest.mark.parametrize("mean", [20, 300])
def test_learns_how_often_a_token_is_the_last_from_what_stops_cut_off(mean: int) -> None:
    rng, ends = random.Random(1), Ends()
    assert ends.rate == 0
    for _ in range(400):
        accepted, tokens = [0] * 4, 0
        for _ in range(16):
            drafts = next((k for k in range(4) if rng.random() > 0.7), 4)
            for k in range(drafts):
                accepted[k] += 1
            tokens += next((k + 1 for k in range(drafts + 1) if rng.random() < 1 / mean), drafts + 1)
        tried = (16, *accepted[:-1])
        view, took = RoundView(16, 1600), StageSeconds(0, 0, 1, 0)
        cut = 16 + sum(accepted) - tokens
        ends.observe(RoundOutcome(chain(4), view, tokens, took, tried, tuple(accepted), cut))
    assert ends.rate == pytest.approx(1 / mean, rel=0.5)
    assert Ends.of(ends.state()).rate == ends.rate


@pytest.mark.parametrize("tokens", [4, 1])
def test_rounds_without_drafts_tell_nothing_of_ends(tokens: int) -> None:
    """An engine that launches rounds ahead runs some for requests that have ended: they bring no token and cut none."""
    ends = Ends()
    ends.observe(RoundOutcome(OFF, RoundView(4, 40), tokens, StageSeconds(0, 0, 1, 0)))
    assert ends.state() == [0, 0]
