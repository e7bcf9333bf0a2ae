from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.types import AcceptanceStats
from services.speculation.acceptance import AcceptanceCounter

STEPS = st.lists(
    st.tuples(st.sampled_from(["off", "eagle_3_1_4", "suffix_8_1_9"]), st.integers(0, 8), st.integers(1, 9)).map(
        lambda s: (s[0], 0 if s[0] == "off" else max(s[1], 1), min(s[2], s[1] + 1) if s[1] else 1)
    ),
    max_size=20,
)


def count(steps: list[tuple[str, int, int]]) -> AcceptanceStats:
    counter = AcceptanceCounter()
    for name, proposed, emitted in steps:
        if proposed:
            counter.verify(name, proposed, min(emitted, proposed + 1))
        else:
            counter.plain(name)
    return counter.stats()


@given(STEPS)
def test_rows_5_and_9_counters_stay_within_what_was_emitted(steps: list[tuple[str, int, int]]) -> None:
    stats = count(steps)
    emitted = sum(min(e, p + 1) if p else 1 for _, p, e in steps)
    plain = sum(p == 0 for _, p, _ in steps)
    assert stats.num_accepted_tokens + stats.verify_steps + plain == emitted
    assert stats.acceptance_rate is None or 0 <= stats.acceptance_rate <= 1
    assert stats.acceptance_length is None or stats.acceptance_length >= 1
    assert sum(stats.steps_by_strategy.values()) == len(steps)
    assert not stats.histogram or stats.histogram[-1] > 0


@given(STEPS, STEPS)
def test_merging_is_counting_together(a: list[tuple[str, int, int]], b: list[tuple[str, int, int]]) -> None:
    assert AcceptanceStats.merged([count(a), count(b)]) == count(a + b)


def test_row_9_the_bonus_is_not_an_accepted_token() -> None:
    stats = count([("eagle_3_1_4", 3, 4), ("eagle_3_1_4", 3, 1)])
    assert stats.acceptance_rate == 0.5 and stats.acceptance_length == 2.5
    assert stats.histogram == (1, 0, 0, 1) and stats.proposed == 6


def test_nothing_verified_has_no_rate() -> None:
    stats = count([("off", 0, 1)])
    assert stats.acceptance_rate is None and stats.acceptance_length is None
    assert AcceptanceStats.merged([]) == AcceptanceStats()


@pytest.mark.parametrize(("proposed", "emitted"), [(3, 0), (3, 5), (0, 2)])
def test_row_5_more_than_was_offered_is_a_bug(proposed: int, emitted: int) -> None:
    with pytest.raises(AssertionError):
        AcceptanceCounter().verify("eagle_3_1_4", proposed, emitted)
