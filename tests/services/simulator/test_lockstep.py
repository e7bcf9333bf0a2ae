from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulator.lockstep import (
    MIN_ROUNDS,
    SPAN,
    Gap,
    Response,
    Rules,
    beginning,
    by_server,
    gaps,
    joined,
    lateness,
    lockstep,
    pooled,
)
from services.speculation.cost_table import CostTable
from services.speculation.round import RoundView
from services.speculation.strategy import OFF

RULES = Rules(capacity=64)
PREFILL_S = 0.25


def served(
    rounds: Sequence[int], seconds: Sequence[float], late_s: Sequence[float] = (), start_s: float = 7.0
) -> list[Response]:
    """One server's responses of so many rounds; a round takes `seconds[n]` while n run."""
    found, now_s, done = list[Response](), start_s + PREFILL_S, 0
    late_s = late_s or [0.0] * len(rounds)
    for i, count in enumerate(sorted(rounds)):
        now_s += (count - done) * seconds[len(rounds) - i]
        done = count
        group = f"step00001/{i // 2:04d}"
        found.append(Response(group, i % 2, "rollout-0", 10, count, count, start_s, now_s + late_s[i]))
    return found


def test_a_gap_is_what_lies_between_two_ends() -> None:
    found = gaps(served([310, 355, 480], [0.0, 1.0, 2.0, 3.0]), RULES)
    assert [(g.rounds, g.running) for g in found] == [(45, 2), (125, 1)]
    assert [g.seconds for g in found] == [pytest.approx(90.0), pytest.approx(125.0)]
    assert [g.context for g in found] == [2 * (10 + 332.5), 10 + 417.5]


def test_ends_in_one_round_are_one_end_and_the_first_look_counts() -> None:
    found = gaps(served([20, 40, 40, 60], [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.5, 0.25, 0.0]), RULES)
    assert [(g.rounds, g.running) for g in found] == [(20, 3), (20, 1)]
    assert found[0].seconds == pytest.approx(60.25)


def test_a_dense_block_is_read_as_wide_as_its_longest_request() -> None:
    """A chain's requests make different progress in a round: 40 rounds for 40 tokens and 40 for 120."""
    own = served([20, 40, 60], [0.0, 1.0, 1.0, 1.0])
    own[1:] = [replace(own[1], rounds=40, tokens=120), replace(own[2], tokens=60)]
    (first, _) = gaps(own, replace(RULES, dense=True))
    assert first.context == 2 * (10 + 90)
    assert gaps(own, RULES)[0].context == 10 + 90 + 10 + 30


@given(
    st.lists(st.integers(1, 400), min_size=2, max_size=24),
    st.lists(st.floats(0.001, 0.2), min_size=25, max_size=25),
    st.lists(st.floats(0.0, 1.0), min_size=24, max_size=24),
    st.sampled_from([0.0, 0.01, 0.1]),
)
def test_joined_gaps_are_long_enough_for_ends_that_are_seen_late(
    rounds: list[int], seconds: list[float], shares: list[float], late_s: float
) -> None:
    own = served(rounds, seconds, [late_s * share for share in shares[: len(rounds)]])
    exact = served(rounds, seconds)
    rules = Rules(capacity=24, late_s=late_s)
    assert lockstep(own, rules)
    parts, found = gaps(own, rules), joined(gaps(own, rules), late_s)
    for gap in found:
        assert gap.rounds >= MIN_ROUNDS and gap.seconds >= SPAN * late_s and 1 <= gap.running <= len(rounds)
    if found:  # all rounds and seconds, or nothing
        assert sum(g.rounds for g in found) == sum(g.rounds for g in parts)
        assert sum(g.seconds for g in found) == pytest.approx(sum(g.seconds for g in parts), abs=1e-9)
    start = min(rounds)
    for gap in found:
        real_s = sum(seconds[sum(r.rounds > n for r in exact)] for n in range(start, start + gap.rounds))
        assert abs(gap.seconds - real_s) <= gap.seconds / SPAN + 1e-9
        requests = sum(sum(r.rounds > n for r in exact) for n in range(start, start + gap.rounds))
        assert gap.running * gap.rounds == pytest.approx(requests)
        start += gap.rounds


def test_ends_in_the_wrong_order_tell_how_late_they_were_seen() -> None:
    own = served([10, 20, 30, 40], [0.0] + [0.01] * 4)
    assert lateness(own) == 0.0
    own[1] = replace(own[1], finished_s=own[3].finished_s + 0.05)
    assert lateness(own) == pytest.approx(0.05 + 0.2 - 0.1)
    assert lockstep(own, replace(RULES, late_s=0.16)) and not lockstep(own, replace(RULES, late_s=0.14))


def test_what_spans_less_tells_nothing() -> None:
    found = gaps(served([10, 14, 18, 30], [0.0, 0.01, 0.01, 0.01, 0.01]), RULES)
    assert joined(found, late_s=0.1) == []
    assert [g.rounds for g in joined(found, late_s=0.0)] == [8, 12]


def test_what_is_left_at_the_end_goes_to_the_last() -> None:
    found = joined(gaps(served([10, 20, 24], [0.0, 3.0, 2.0, 1.0]), RULES), 0.0)
    assert [(g.rounds, g.seconds) for g in found] == [(14, pytest.approx(10 * 2.0 + 4 * 3.0))]


def test_gaps_of_one_size_are_one_by_their_rounds() -> None:
    """Otherwise a slow moment, once in a while, would count for less than it took."""
    quick, slow, other = Gap(90, 0.9, 8.0, 800.0), Gap(10, 0.5, 8.2, 850.0), Gap(30, 0.1, 2.0, 200.0)
    first, second = pooled([quick, other, slow])
    assert (first.rounds, first.seconds, second) == (100, pytest.approx(1.4), other)
    assert first.running == pytest.approx(8.02) and first.context == pytest.approx(805)
    longer = replace(quick, context=8000.0)
    assert pooled([quick, longer]) == [quick, longer], "of much longer contexts"


def test_who_is_not_in_lockstep_is_told() -> None:
    own = served([20, 40, 60], [0.0, 1.0, 1.0, 1.0])
    assert lockstep(own, RULES)
    assert not lockstep(own, Rules(capacity=2)), "more than fit: one waited"
    late = [*own[:2], replace(own[2], started_s=own[0].finished_s + 0.1)]
    assert not lockstep(late, RULES), "one began when another had ended"
    other = [own[0], replace(own[1], finished_s=own[2].finished_s + 1.0), own[2]]
    assert not lockstep(other, RULES), "more rounds, and an earlier end"
    assert lockstep(other, replace(RULES, late_s=1.0)), "perhaps it was seen late"
    assert not lockstep([replace(own[0], rounds=0), *own[1:]], RULES)


def test_before_the_first_end_lie_the_prefill_and_rounds_of_known_cost() -> None:
    table, rounds = CostTable.typical(), [100, 200, 300]
    cost = table.seconds(OFF, RoundView(3, 3 * (10 + 50))).total
    first = beginning(served(rounds, [0.0, 1.0, 1.0, cost]), RULES)
    assert first.tokens == 20, "two groups, each prompt once"
    assert first.prefill_s(OFF, table) == pytest.approx(PREFILL_S)


def test_servers_are_looked_at_apart() -> None:
    own = served([20, 40], [0.0, 1.0, 1.0])
    mixed = [own[0], replace(own[0], server="rollout-1"), own[1]]
    assert [[r.server for r in part] for part in by_server(mixed)] == [["rollout-0"] * 2, ["rollout-1"]]
