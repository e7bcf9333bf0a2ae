"""How a batch's packs are divided among policy workers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from services.models.packing import plan_rows
from services.policy.packs import empty_pack, own_plans, shared_plans, waited_for
from tests.services.policy.teams import Case, new_trainer

lengths = st.lists(st.integers(0, 60), max_size=20)


@given(lengths=lengths, budget=st.integers(64, 512), size=st.integers(1, 5))
def test_every_sequence_is_with_one_worker_and_all_make_as_many_passes(
    lengths: list[int], budget: int, size: int
) -> None:
    plans = shared_plans(lengths, budget, size)
    parts = [own_plans(plans, rank, size) for rank in range(size)]
    members = Counter(i for part in parts for plan in part if plan is not None for i in plan.members)
    assert members == Counter(i for i, n in enumerate(lengths) if n)
    assert len({len(part) for part in parts}) == 1
    assert sum(plan is None for part in parts for plan in part) < size
    assert all(part[:-1] == [p for p in part[:-1] if p is not None] for part in parts), "only the last may be empty"
    for passes in zip(*parts, strict=True):
        widths = [len(p.rows) * p.width for p in passes if p is not None]
        assert all(width <= max(budget, *lengths) for width in widths)


@given(lengths=lengths, budget=st.integers(64, 512), size=st.integers(2, 5))
def test_cutting_evenly_never_waits_longer_nor_makes_more_passes(lengths: list[int], budget: int, size: int) -> None:
    even, full = shared_plans(lengths, budget, size), plan_rows(lengths, budget)
    assert waited_for(even, size) <= waited_for(full, size)
    assert -(-len(even) // size) == -(-len(full) // size)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20), size=st.integers(2, 5))
def test_no_worker_idles_while_another_has_rows_to_spare(lengths: list[int], size: int) -> None:
    (whole,) = plan_rows(lengths, 10**6)
    share = -(-len(whole.rows) // size) * whole.width
    assume(len(plan_rows(lengths, share)) <= size)  # else so small packs would take another pass
    assert max(len(plan.rows) * plan.width for plan in shared_plans(lengths, 10**6, size)) <= share


@pytest.mark.parametrize(("count", "budget"), [(3, 10**6), (9, 8 * 100), (17, 8 * 100)])
@pytest.mark.parametrize("size", [2, 4])
def test_workers_get_about_the_same_when_there_is_a_little_more_than_fits(count: int, budget: int, size: int) -> None:
    """A rest of one sequence behind full packs would have all workers but one wait for a pass of its own."""
    total = count * 100
    assert waited_for(shared_plans([100] * count, budget, size), size) <= total / size + 100


def test_what_a_pass_waits_for_is_its_largest_pack() -> None:
    plans = plan_rows([50, 40, 30, 20, 10], 50)
    parts = [own_plans(plans, rank, 2) for rank in range(2)]
    passes = zip(*parts, strict=True)
    assert waited_for(plans, 2) == sum(max(len(p.rows) * p.width for p in pair if p is not None) for pair in passes)


def test_an_empty_pass_runs_every_weight_and_moves_none() -> None:
    made = new_trainer(Case())
    scores = made._score(made._scorer, empty_pack(torch.device("cpu"), torch.float32))
    assert scores.logprobs.shape == (0,) and scores.hidden.shape[:2] == (1, 1)
    scores.logprobs.sum().backward()
    gradients = [p.grad for p in made.model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)
