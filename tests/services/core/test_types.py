"""Invariants of the records, and acceptance accounting that cannot run past what was emitted."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import types
from services.core.types import (
    AcceptanceStats,
    FinishReason,
    Group,
    GroupWork,
    PartialRollout,
    Prompt,
    Reward,
    Rollout,
    SamplingParams,
)

PROMPT = Prompt("p", "1 + 1=", (1, 2, 3), "2", "chain_sum")


def rollout(index: int, tokens: int = 2) -> Rollout:
    return Rollout(
        group_id="g",
        prompt_id="p",
        index=index,
        seed=7 + index,
        prompt_ids=PROMPT.token_ids,
        response_ids=tuple(range(tokens)),
        rollout_logprobs=(-0.5,) * tokens,
        text="2",
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(),
        policy_versions=(0,),
        drafter_versions=(0,),
        acceptance=AcceptanceStats(),
    )


@given(
    depth=st.integers(1, 8),
    accepted=st.lists(st.integers(0, 8), min_size=1, max_size=40),
)
def test_acceptance_counts_the_bonus_in_the_length_and_not_in_the_rate(depth: int, accepted: list[int]) -> None:
    """A bonus token in the numerator made acceptance rates above 1 (pitfall 9)."""
    accepted = [min(a, depth) for a in accepted]
    histogram = tuple(accepted.count(k) for k in range(depth + 1))
    stats = AcceptanceStats(histogram, proposed=depth * len(accepted))
    assert stats.verify_steps == len(accepted)
    assert stats.num_accepted_tokens == sum(accepted)
    assert stats.acceptance_rate is not None and 0 <= stats.acceptance_rate <= 1
    committed = sum(a + 1 for a in accepted)
    assert stats.acceptance_length == pytest.approx(committed / len(accepted))


def test_no_verify_step_has_no_acceptance() -> None:
    stats = AcceptanceStats()
    assert stats.acceptance_length is None and stats.acceptance_rate is None and stats.verify_steps == 0


def test_only_empty_drafts_have_a_length_but_no_rate() -> None:
    stats = AcceptanceStats(histogram=(3,), proposed=0)
    assert stats.acceptance_length == 1.0 and stats.acceptance_rate is None


def test_one_logprob_per_emitted_token() -> None:
    """Engines have returned a logprob for the first token only (pitfall 10)."""
    with pytest.raises(AssertionError, match="one logprob per emitted token"):
        dataclasses.replace(rollout(0, tokens=16), rollout_logprobs=(-0.5,))


def test_work_names_each_rollout_once() -> None:
    assert GroupWork("g", PROMPT, (0, 2), (7, 9), SamplingParams()).indices == (0, 2)
    for indices, seeds in [((0, 0), (1, 2)), ((0, 1), (1,)), ((), ())]:
        with pytest.raises(AssertionError):
            GroupWork("g", PROMPT, indices, seeds, SamplingParams())


def test_a_group_is_complete_and_in_order() -> None:
    reward = Reward(1.0, True)
    assert len(Group(PROMPT, (rollout(0), rollout(1)), (reward, reward)).rollouts) == 2
    for rollouts in [(rollout(1), rollout(0)), (rollout(0), rollout(0)), (rollout(1),)]:
        with pytest.raises(AssertionError):
            Group(PROMPT, rollouts, (reward,) * len(rollouts))


def test_a_rollout_crosses_processes_unchanged() -> None:
    assert pickle.loads(pickle.dumps(rollout(3))) == rollout(3)


def test_every_record_is_frozen() -> None:
    records = [kind for kind in vars(types).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    assert len(records) > 15
    assert all(kind.__dataclass_params__.frozen for kind in records)  # type: ignore[attr-defined]


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_half_done_response_has_a_logprob_for_each_of_its_tokens(tokens: int, logprobs: int) -> None:
    """Row 50: what is cut in the middle and continued must not come with less than it has tokens; the trainer's mask is
    made of the response alone."""
    parts = ("g", 0, tuple(range(tokens)), (-0.5,) * logprobs, (0, 1), (0,), AcceptanceStats(), 0.0)
    if tokens == logprobs:
        assert PartialRollout(*parts).response_ids == dataclasses.replace(rollout(0, tokens)).response_ids
        return
    with pytest.raises(AssertionError, match="one logprob per emitted token"):
        PartialRollout(*parts)
    with pytest.raises(AssertionError, match="one logprob per emitted token"):
        dataclasses.replace(rollout(0, tokens), rollout_logprobs=(-0.5,) * logprobs)


STATS = st.builds(
    AcceptanceStats,
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 50),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)),
)


@given(st.lists(STATS, max_size=5))
def test_merged_accounting_is_the_sum_without_empty_places_at_the_end(parts: list[AcceptanceStats]) -> None:
    merged = AcceptanceStats.merged(parts)
    assert merged.verify_steps == sum(p.verify_steps for p in parts)
    assert merged.num_accepted_tokens == sum(p.num_accepted_tokens for p in parts)
    assert merged.proposed == sum(p.proposed for p in parts)
    assert not merged.histogram or merged.histogram[-1] > 0
    for k, number in enumerate(merged.histogram):
        assert number == sum(p.histogram[k] for p in parts if k < len(p.histogram))
    for name in "abc":
        for field in ("steps_by_strategy", "accepted_by_strategy"):
            known = [getattr(p, field) for p in parts]
            assert getattr(merged, field).get(name, 0) == sum(d.get(name, 0) for d in known)
