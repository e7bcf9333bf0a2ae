"""What an engine remembers of its selector's choices: everything that counts, in bounded room."""

from __future__ import annotations

import math
import random

import pytest

from services.config.speculation import StrategyConfig
from services.rollout.choices import ChoiceLog
from services.speculation.round import Choice
from services.speculation.strategy import OFF, draft_strategy

CHAIN = draft_strategy(StrategyConfig(drafter="eagle", depth=3, num_draft_tokens=4))
SUFFIX = draft_strategy(StrategyConfig(drafter="suffix", depth=4, num_draft_tokens=5))


def test_a_selector_that_flaps_is_told_in_a_bounded_number_of_spans() -> None:
    rng, log, at = random.Random(3), ChoiceLog(limit=8), 0.0
    tokens = verify_steps = 0
    off_s = 0.0
    for _ in range(20_000):
        strategy, running, emitted = rng.choice([OFF, CHAIN, SUFFIX]), rng.randint(5, 8), rng.randint(5, 30)
        log.note(Choice(strategy, "tried", 100.0, 50.0), running, emitted, at, at + 0.01)
        at, tokens, verify_steps, off_s = at + 0.02, tokens + emitted, verify_steps + running, off_s + emitted / 50
    told = log.take()
    assert len(told) == 3, "one of each kind"
    assert sum(s.rounds for s in told) == 20_000 and sum(s.tokens for s in told) == tokens
    assert sum(s.verify_steps for s in told) == verify_steps
    assert sum(s.rounds_s for s in told) == pytest.approx(200.0)
    assert sum(s.off_s or 0.0 for s in told) == pytest.approx(off_s)
    assert log.take() == ()


def test_a_drain_is_told_by_ranges_of_requests() -> None:
    log = ChoiceLog()
    for i, running in enumerate([9, 8, 7, 5, 4, 3, 2, 1, 1]):
        log.note(Choice(OFF if running > 4 else CHAIN, "cheapest"), running, running, float(i), i + 1.0)
    told = [(s.strategy, s.rounds, s.running_first, s.running_last, s.start_s, s.end_s) for s in log.take()]
    assert told == [
        ("off", 1, 9, 9, 0.0, 1.0), ("off", 3, 8, 5, 1.0, 4.0), (CHAIN.name, 2, 4, 3, 4.0, 6.0),
        (CHAIN.name, 1, 2, 2, 6.0, 7.0), (CHAIN.name, 2, 1, 1, 7.0, 9.0),
    ]  # fmt: skip


@pytest.mark.parametrize("expected, off", [(math.nan, math.nan), (10.0, math.nan), (math.inf, 5.0), (10.0, 0.0)])
def test_what_is_not_predicted_is_unknown(expected: float, off: float) -> None:
    log = ChoiceLog()
    log.note(Choice(CHAIN, "why", expected, off), 2, 4, 0.0, 1.0)
    log.note(Choice(CHAIN, "why", 8.0, 4.0), 2, 4, 1.0, 2.0)
    unknown, known = log.take()
    assert unknown.expected is None and unknown.off_s is None
    assert known.expected == 8.0 and known.off_s == 1.0, "the two are not mixed"
