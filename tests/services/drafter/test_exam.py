"""Which drafter is served is decided by more than luck."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from services.drafter.exam import Piece, judge

PIECES = st.lists(
    st.builds(lambda n, a, b: Piece(n, n * a, n * b), st.integers(1, 500), st.floats(1.0, 5.0), st.floats(1.0, 5.0)),
    min_size=1,
    max_size=12,
)


def exam(rng: random.Random, gain: float, pieces: int = 16, noise: float = 0.3) -> list[Piece]:
    """Both have the same hard places; their difference has noise of its own."""
    found = []
    for _ in range(pieces):
        base = rng.uniform(1.2, 2.5)
        found.append(Piece(100, 100 * base, 100 * base * (1 + gain + rng.gauss(0, noise) * 0.1)))
    return found


@given(PIECES, st.floats(0, 0.1))
def test_turning_the_two_round_turns_the_decision_round(pieces: list[Piece], min_gain: float) -> None:
    """Up to the denominator: a gain of x there is a loss of x / (1 + x) here, so near the bound one may stay open."""
    other = judge([Piece(p.starts, p.candidate, p.served) for p in pieces], min_gain)
    found = judge(pieces, min_gain)
    assert {found.decision, other.decision} not in ({"better"}, {"worse"})
    assert math.copysign(1, found.gain) != math.copysign(1, other.gain) or abs(found.gain) < 1e-9


@given(PIECES, st.floats(0, 0.1), st.randoms())
def test_the_order_of_the_pieces_does_not_matter(pieces: list[Piece], min_gain: float, rng: random.Random) -> None:
    shuffled = list(pieces)
    rng.shuffle(shuffled)
    a, b = judge(pieces, min_gain), judge(shuffled, min_gain)
    assert math.isclose(a.gain, b.gain, abs_tol=1e-12)
    if abs(abs(a.gain) - max(min_gain, 2 * a.error)) > 1e-9:
        assert a.decision == b.decision


@given(PIECES)
def test_equal_drafters_stay(pieces: list[Piece]) -> None:
    same = [Piece(p.starts, p.served, p.served) for p in pieces]
    assert judge(same, 0.0).decision == "open"


def test_the_gain_is_that_of_the_acceptance_length() -> None:
    pieces = [Piece(10, 20.0, 22.0), Piece(30, 45.0, 54.0), Piece(5, 10.0, 11.0), Piece(7, 7.0, 7.7)]
    assert math.isclose(judge(pieces, 0.0).gain, sum(p.candidate for p in pieces) / sum(p.served for p in pieces) - 1)


def test_the_error_is_the_spread_that_repeated_exams_have() -> None:
    rng = random.Random(0)
    found = [judge(exam(rng, 0.05), 0.0) for _ in range(1500)]
    mean = sum(v.gain for v in found) / len(found)
    spread = math.sqrt(sum((v.gain - mean) ** 2 for v in found) / len(found))
    told = math.sqrt(sum(v.error**2 for v in found) / len(found))
    assert abs(told / spread - 1) < 0.1


def test_luck_rarely_passes_and_a_real_gain_does() -> None:
    rng = random.Random(1)
    lucky = [judge(exam(rng, 0.0), 0.002).decision for _ in range(2000)]
    assert 0.005 < lucky.count("better") / 2000 < 0.06 and 0.005 < lucky.count("worse") / 2000 < 0.06
    real = [judge(exam(rng, 0.05), 0.002).decision for _ in range(300)]
    assert real.count("better") > 290


def test_less_than_the_wanted_gain_is_not_enough_however_sure() -> None:
    pieces = [Piece(100, 200.0, 200.2)] * 50
    assert judge(pieces, 0.002).decision == "open" and judge(pieces, 0.0005).decision == "better"


def test_too_little_is_no_exam_and_nonsense_is_worse() -> None:
    assert judge([], 0.0).decision == judge([Piece(9, 9.0, 30.0)], 0.0).decision == "open"
    assert judge([Piece(9, 9.0, math.nan), Piece(9, 9.0, 9.0)], 0.0).decision == "worse"
