from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.policy import Cispo, Dapo, DrGrpo, Grpo, Gspo, OverlongConfig, Rloo
from services.core.errors import BatchError
from services.core.types import AcceptanceStats, FinishReason, Group, Prompt, Reward, Rollout, SamplingParams
from services.policy.advantage import EPS, overlong_penalty
from services.policy.advantage import advantages as by_algorithm

PROMPT = Prompt("p", "1+1=", (1,), "2", "chain_sum")


def group(values: Sequence[float | None], name: str = "g") -> Group:
    """None is a reward with an error."""
    rollouts = tuple(
        Rollout(
            name, "p", i, 0, (1,), (2,), (-1.0,), "", FinishReason.STOP, SamplingParams(), (0,), (), AcceptanceStats()
        )
        for i in range(len(values))
    )
    rewards = tuple(Reward(0.0, False, "timeout") if v is None else Reward(v, v > 0) for v in values)
    return Group(PROMPT, rollouts, rewards)


def advantages(groups: Sequence[Group]) -> tuple[tuple[float, ...], float]:
    return by_algorithm(groups, Grpo())


def by_hand(values: Sequence[float]) -> list[float]:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / (std + EPS) for v in values]


def test_close_rewards_keep_their_size_beside_other_groups() -> None:
    """Row 40: a floor shared by a stack of groups shrank these a hundred times."""
    found, fraction = advantages([group([1, 1.00001]), group([2, 2.00001])])
    assert found == pytest.approx((-0.6195, 0.6195, -0.6195, 0.6195), abs=1e-3)
    assert fraction == 0.0


@given(st.lists(st.lists(st.floats(-100, 100, width=16), min_size=2, max_size=8), min_size=1, max_size=5))
def test_each_group_is_its_own_whatever_stands_beside_it(values: list[list[float]]) -> None:
    together, fraction = advantages([group(v, f"g{i}") for i, v in enumerate(values)])
    alone = [advantages([group(v)])[0] for v in values]
    assert together == tuple(a for one in alone for a in one)
    for v, one in zip(values, alone, strict=True):
        assert one == pytest.approx(by_hand(v) if len(set(v)) > 1 else [0.0] * len(v), rel=1e-6, abs=1e-6)
    assert fraction == pytest.approx(sum(len(set(v)) == 1 for v in values) / len(values))


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [0.1 + 0.2, 0.3], [0.0, 0.0], [-3.0, -3.0]])
def test_equal_rewards_carry_no_signal(values: list[float]) -> None:
    found, fraction = advantages([group(values), group([0.0, 1.0])])
    assert found[: len(values)] == (0.0,) * len(values)
    assert fraction == 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_is_not_zero_variance(bad: float) -> None:
    with pytest.raises(BatchError, match="g#1 has reward"):
        advantages([group([bad if i == 1 else 1.0 for i in range(3)])])
    with pytest.raises(BatchError):
        advantages([group([bad, bad])])


def test_a_verifier_error_is_no_wrong_answer() -> None:
    found, fraction = advantages([group([1.0, None, 0.0, 1.0])])
    expected = by_hand([1.0, 0.0, 1.0])
    assert found == pytest.approx((expected[0], 0.0, expected[1], expected[2]))
    assert fraction == 0.0


@pytest.mark.parametrize("values", [[None, None], [1.0, None], [1.0, None, 1.0]])
def test_too_few_verdicts_are_no_signal(values: list[float | None]) -> None:
    assert advantages([group(values)]) == ((0.0,) * len(values), 1.0)


def test_no_groups() -> None:
    assert advantages([]) == ((), 0.0)


def test_imports_no_torch() -> None:
    code = "import sys, services.policy.advantage; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("algorithm", [Grpo(), Dapo(), Gspo(), Cispo()])
def test_most_algorithms_standardise(algorithm) -> None:
    values = [0.0, 1.0, 0.5, 2.0]
    assert by_algorithm([group(values)], algorithm)[0] == pytest.approx(by_hand(values))


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8))
def test_dr_grpo_and_rloo_by_their_formulas(values: list[float]) -> None:
    mean, n = statistics.fmean(values), len(values)
    flat = max(values) - min(values) <= 1e-14 * max(1.0, *map(abs, values))
    centred = [0.0] * n if flat else [v - mean for v in values]
    others = [0.0] * n if flat else [v - (sum(values) - v) / (n - 1) for v in values]
    assert by_algorithm([group(values)], DrGrpo())[0] == pytest.approx(centred, abs=1e-9)
    assert by_algorithm([group(values)], Rloo())[0] == pytest.approx(others, abs=1e-9)


def long_rollout(length: int, budget: int = 100) -> Rollout:
    sampling = SamplingParams(max_tokens=budget)
    ids, logprobs = (2,) * length, (-1.0,) * length
    return Rollout("g", "p", 0, 0, (1,), ids, logprobs, "", FinishReason.STOP, sampling, (0,), (), AcceptanceStats())


@pytest.mark.parametrize(("length", "expected"), [(1, 0.0), (80, 0.0), (85, 0.5), (90, 1.0), (100, 2.0)])
def test_the_overlong_penalty_is_linear_over_its_buffer(length: int, expected: float) -> None:
    assert overlong_penalty(long_rollout(length), OverlongConfig(buffer_tokens=20, penalty=2.0)) == expected


def test_overlong_shaping_makes_a_signal_where_all_were_right_and_leaves_the_rewards() -> None:
    rollouts = (long_rollout(50), replace(long_rollout(100), index=1))
    both = Group(PROMPT, rollouts, (Reward(1.0, True), Reward(1.0, True)))
    shaped = Dapo(overlong=OverlongConfig(buffer_tokens=20))
    assert by_algorithm([both], Dapo()) == ((0.0, 0.0), 1.0)
    values, flat = by_algorithm([both], shaped)
    assert flat == 0.0 and values == pytest.approx(tuple(by_hand([1.0, 0.0])))
    assert [r.value for r in both.rewards] == [1.0, 1.0]
