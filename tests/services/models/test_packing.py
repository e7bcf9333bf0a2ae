from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.models.packing import fill_rows, plan_rows, row_layout
from tests.services.models.masks import additive, block_causal

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


@given(LENGTHS, st.integers(1, 120))
def test_every_sequence_sits_in_exactly_one_row_within_budget(lengths: list[int], budget: int) -> None:
    plans = plan_rows(lengths, budget)
    members = sorted(i for p in plans for i in p.members)
    assert members == [i for i, n in enumerate(lengths) if n]
    for plan in plans:
        assert all(sum(lengths[i] for i in row) <= plan.width for row in plan.rows)
        assert len(plan.rows) * plan.width <= budget or len(plan.rows) == 1
        assert plan.width == max(lengths[i] for i in plan.members)


@given(LENGTHS.filter(any))
def test_layout_and_mask(lengths: list[int]) -> None:
    for plan in plan_rows(lengths, 100):
        layout = row_layout(plan, lengths)
        owner = fill_rows(layout, [torch.full((lengths[i],), i + 1) for i in plan.members]) - 1
        order = fill_rows(layout, [torch.arange(lengths[i]) for i in plan.members])
        assert torch.equal(layout.filled, owner >= 0) and torch.equal(order, layout.positions)
        for lag in (0, 1, 3):
            same = (owner[:, :, None] == owner[:, None]) & (owner >= 0)[:, :, None]
            assert torch.equal(block_causal(layout, lag), same & (order[:, None] + lag <= order[:, :, None]))
        mask = additive(block_causal(layout), torch.float32)
        assert torch.isfinite(mask.softmax(-1)).all()


def test_short_sequences_share_rows_of_the_longest_ones_width() -> None:
    plans = plan_rows([10, 100, 40, 50], 200)
    assert [p.width for p in plans] == [100]
    assert plans[0].rows == ((1,), (3, 2, 0))
