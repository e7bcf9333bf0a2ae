"""Stretches of rounds: joining and folding them loses no round, token or second."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.core.spans import StrategySpan, bucket_name, folded, lengthened, running_bucket

rounds = st.lists(
    st.tuples(
        st.sampled_from(["off", "eagle_3_1_4", "suffix_8_1_9"]),
        st.sampled_from(["cheapest", "forced"]),
        st.integers(1, 40),
        st.integers(1, 100),
        st.sampled_from([None, 0.25, 0.5]),
    ),
    max_size=60,
)


def spans_of(drawn: list[tuple[str, str, int, int, float | None]]) -> list[StrategySpan]:
    """One second each, on a grid of exact floats."""
    return [
        StrategySpan(float(i), i + 1.0, name, why, 1, 0.5, running, tokens, running, running, known, known)
        for i, (name, why, running, tokens, known) in enumerate(drawn)
    ]


def sums(spans: list[StrategySpan]) -> dict[object, list[float]]:
    out: dict[object, list[float]] = defaultdict(lambda: [0.0] * 5)
    for s in spans:
        for i, value in enumerate((s.rounds, s.rounds_s, s.verify_steps, s.tokens, s.off_s or 0.0)):
            out[s.key][i] += value
    return dict(out)


@given(rounds, st.integers(1, 20))
def test_folding_keeps_every_round_and_token(drawn: list[tuple[str, str, int, int, float | None]], limit: int) -> None:
    single = spans_of(drawn)
    grown: list[StrategySpan] = []
    for span in single:
        grown = lengthened(grown, span)
    assert all(a.key != b.key for a, b in pairwise(grown)), "neighbours of a kind are one"
    assert all(a.end_s <= b.start_s for a, b in pairwise(grown))
    few = folded(grown, limit)
    assert sums(single) == sums(grown) == sums(few)
    assert len(few) <= max(limit, len({s.key for s in single}))
    assert [s.start_s for s in few] == sorted(s.start_s for s in few)
    assert all(s.end_s == max(o.end_s for o in single if o.key == s.key) for s in few if len(few) < len(grown))
    assert folded(few, limit) == few


@given(st.integers(1, 5000))
def test_every_number_of_requests_has_one_bucket_that_names_it(running: int) -> None:
    low, _, high = bucket_name(running_bucket(running)).partition("-")
    assert int(low) <= running <= int(high or low)
    assert running_bucket(running + 1) - running_bucket(running) in (0, 1)


def test_rates_are_those_of_the_predicted_seconds() -> None:
    one = StrategySpan(0.0, 1.0, "a", "why", 2, 0.5, 8, 20, 4, 4, on_s=0.5, off_s=1.0)
    both = one.joined(StrategySpan(1.0, 2.0, "a", "why", 1, 0.5, 3, 10, 3, 3, on_s=0.25, off_s=2.0))
    assert both.expected == 40.0 and both.expected_off == 10.0 and both.tokens_per_s == 30.0
    assert (both.running_first, both.running_last, both.start_s, both.end_s) == (4, 3, 0.0, 2.0)
    unknown = StrategySpan(0.0, 1.0, "a", "why", 2, 0.5, 8, 20, 4, 4)
    assert unknown.expected is None and unknown.expected_off is None and not unknown.predicted
