"""SGLang's histogram in the project's terms (rows 5 and 9)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.types import AcceptanceStats
from services.rollout.sglang.acceptance import acceptance_stats
from services.rollout.sglang.rounds import note_round
from services.speculation.acceptance import AcceptanceCounter
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.rollout.engines import strategy

CHAINS = [strategy("eagle", 1), strategy("eagle", 3), strategy("ngram", 7)]
TREE = strategy("eagle", 3, 4, 12, sampled=False)


def told(steps: list[int]) -> list[int]:
    """What SGLang counts: index k, verify steps that accepted k draft tokens."""
    return [steps.count(k) for k in range(max(steps, default=-1) + 1)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[DraftStrategy, list[int]]:
    s = draw(st.sampled_from([*CHAINS, TREE]))
    return s, draw(st.lists(st.integers(0, s.depth), max_size=30))


def check(a: AcceptanceStats, s: DraftStrategy, num_tokens: int) -> None:
    assert all(n >= 0 for n in a.histogram) and (not a.histogram or a.histogram[-1])
    assert a.num_accepted_tokens + a.verify_steps <= max(0, num_tokens - 1), "counters within the emitted tokens"
    assert a.proposed == a.verify_steps * (s.num_draft_tokens - 1)
    if a.verify_steps:
        assert a.steps_by_strategy == {s.name: a.verify_steps}
        assert 1 <= a.acceptance_length <= s.depth + 1 <= s.num_draft_tokens and 0 <= a.acceptance_rate <= 1
    else:
        assert a.acceptance_length is None and a.acceptance_rate is None


@given(runs())
def test_without_surplus_it_is_what_sglang_counted(run: tuple[DraftStrategy, list[int]]) -> None:
    s, steps = run
    num_tokens = 1 + sum(k + 1 for k in steps)
    a = acceptance_stats(told(steps), num_tokens, {s.depth: s})
    check(a, s, num_tokens)
    if steps:
        assert (
            list(a.histogram) == told(steps) and 1 + sum((k + 1) * n for k, n in enumerate(a.histogram)) == num_tokens
        )
    else:
        assert a == AcceptanceStats(steps_by_strategy={OFF.name: 1})


@given(runs(), st.data())
def test_a_surplus_in_the_last_step_leaves_the_sums_of_the_native_engine(
    run: tuple[DraftStrategy, list[int]], data: st.DataObject
) -> None:
    """The native engine counts what each step committed; the same steps told by SGLang, cut inside the last one, come
    to the same number of steps and of accepted tokens."""
    s, steps = run
    if not steps:
        return
    cut = data.draw(st.integers(0, steps[-1]))
    num_tokens = 1 + sum(k + 1 for k in steps) - cut
    counter = AcceptanceCounter()
    for k in [*steps[:-1], steps[-1] - cut]:
        counter.verify(s.name, s.num_draft_tokens - 1, k + 1)
    wanted, found = counter.stats(), acceptance_stats(told(steps), num_tokens, {s.depth: s})
    check(found, s, num_tokens)
    assert found.verify_steps == wanted.verify_steps and found.num_accepted_tokens == wanted.num_accepted_tokens
    assert found.proposed == wanted.proposed and found.steps_by_strategy == wanted.steps_by_strategy


@given(runs(), st.data())
def test_any_surplus_is_taken_away_exactly(run: tuple[DraftStrategy, list[int]], data: st.DataObject) -> None:
    """Seen late, a stop string leaves whole verify steps behind it."""
    s, steps = run
    full = 1 + sum(k + 1 for k in steps)
    num_tokens = data.draw(st.integers(1, full))
    a = acceptance_stats(told(steps), num_tokens, {s.depth: s})
    check(a, s, num_tokens)
    if steps:
        assert 1 + sum((k + 1) * n for k, n in enumerate(a.histogram)) == num_tokens


@given(runs(), st.integers(1, 5))
def test_tokens_of_further_prefills_belong_to_no_verify_step(run: tuple[DraftStrategy, list[int]], more: int) -> None:
    """Every policy load under way is followed by a prefill, which emits a token."""
    s, steps = run
    num_tokens = 1 + more + sum(k + 1 for k in steps)
    a = acceptance_stats(told(steps), num_tokens, {s.depth: s})
    check(a, s, num_tokens)
    assert a.verify_steps == len(steps) and a.num_accepted_tokens == sum(steps)


@pytest.mark.parametrize("histogram", [(), (0,), (0, 0, 0)])
def test_without_speculation_every_token_is_a_decode_step(histogram: tuple[int, ...]) -> None:
    assert acceptance_stats(histogram, 7, {OFF.depth: OFF}) == AcceptanceStats(steps_by_strategy={"off": 7})
    assert acceptance_stats(histogram, 0, {OFF.depth: OFF}) == AcceptanceStats()


def test_the_last_step_is_the_smallest_that_can_have_held_the_surplus() -> None:
    assert acceptance_stats([2, 0, 1, 1], 1 + 2 + 3 + 4 - 1, {CHAINS[1].depth: CHAINS[1]}).histogram == (2, 1, 0, 1)
    assert acceptance_stats([0, 0, 0, 5], 1 + 20 - 3, {CHAINS[1].depth: CHAINS[1]}).histogram == (1, 0, 0, 4)


def test_whole_steps_of_the_commonest_size_go_first() -> None:
    """Not the longest ones, which would make a drafter look worse than it is, nor the shortest."""
    assert acceptance_stats([4, 0, 2], 1 + 4 + 6 - 5, {CHAINS[1].depth: CHAINS[1]}).histogram == (2, 0, 1)
    assert acceptance_stats([1, 0, 0, 9], 1 + 1 + 36 - 12, {CHAINS[1].depth: CHAINS[1]}).histogram == (1, 0, 0, 6)


# ------------------------------------------------------------------ several strategies

SWITCHED = {0: OFF, **{d: strategy("eagle", d) for d in (1, 3, 5)}}
Steps = list[tuple[int, int]]


@st.composite
def switched(draw: st.DrawFn) -> Steps:
    """(depth, accepted) round by round."""
    depths = draw(st.lists(st.sampled_from(list(SWITCHED)), max_size=30))
    return [(d, draw(st.integers(0, d))) for d in depths]


def numbers_of(steps: Steps) -> list[int]:
    numbers: list[int] = []
    for depth, accepted in steps:
        note_round(numbers, depth, accepted)
    return numbers


def check_switched(a: AcceptanceStats, num_tokens: int) -> None:
    drafted = {n: c for n, c in a.steps_by_strategy.items() if n != OFF.name}
    assert sum(drafted.values()) == a.verify_steps == sum(a.histogram)
    assert sum(a.accepted_by_strategy.values()) == a.num_accepted_tokens
    assert drafted.keys() == a.accepted_by_strategy.keys()
    assert a.proposed == sum(s.depth * drafted.get(s.name, 0) for s in SWITCHED.values())
    assert sum(a.steps_by_strategy.values()) + a.num_accepted_tokens <= max(0, num_tokens - 1)


@given(switched())
def test_rounds_go_to_the_strategies_that_ran_them(steps: Steps) -> None:
    num_tokens = 1 + sum(k + 1 for _, k in steps)
    a = acceptance_stats(numbers_of(steps), num_tokens, SWITCHED)
    check_switched(a, num_tokens)
    for depth, s in SWITCHED.items():
        mine = [k for d, k in steps if d == depth]
        assert a.steps_by_strategy.get(s.name, 0) == len(mine)
        assert a.accepted_by_strategy.get(s.name, 0) == sum(mine)


@given(switched(), st.data())
def test_a_surplus_is_taken_from_the_newest_rounds_strategy_first(steps: Steps, data: st.DataObject) -> None:
    if not steps:
        return
    newest, last = steps[-1]
    cut = data.draw(st.integers(0, last))
    num_tokens = 1 + sum(k + 1 for _, k in steps) - cut
    a = acceptance_stats(numbers_of(steps), num_tokens, SWITCHED)
    check_switched(a, num_tokens)
    for depth, s in SWITCHED.items():
        mine = [k for d, k in steps if d == depth]
        assert a.steps_by_strategy.get(s.name, 0) == len(mine), "no round is lost"
        assert a.accepted_by_strategy.get(s.name, 0) == sum(mine) - (cut if depth == newest else 0)


@given(switched(), st.data())
def test_whatever_is_cut_off_the_sum_is_what_was_emitted(steps: Steps, data: st.DataObject) -> None:
    full = 1 + sum(k + 1 for _, k in steps)
    num_tokens = data.draw(st.integers(1, full))
    a = acceptance_stats(numbers_of(steps), num_tokens, SWITCHED)
    check_switched(a, num_tokens)
    assert 1 + sum(a.steps_by_strategy.values()) + a.num_accepted_tokens == num_tokens


def test_nothing_but_a_prefill_is_no_round_of_any_strategy() -> None:
    assert acceptance_stats((), 1, SWITCHED) == AcceptanceStats()
