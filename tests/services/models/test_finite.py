from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.models.finite import all_finite, not_finite

BAD = (float("nan"), float("inf"), float("-inf"))
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@given(st.sampled_from(FLOATS), st.integers(1, 300), st.integers(1, 5), st.data())
def test_one_bad_number_is_found_wherever_it_is(
    dtype: torch.dtype, rows: int, columns: int, data: st.DataObject
) -> None:
    tensor = torch.randn(rows, columns).to(dtype)
    tensor[0, 0] = torch.finfo(dtype).max
    tensor[-1, -1] = torch.finfo(dtype).min
    for view in (tensor, tensor.t(), tensor[:, :1], tensor.flatten()[::2]):
        assert all_finite(view)
    at = data.draw(st.integers(0, tensor.numel() - 1))
    tensor.view(-1)[at] = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    assert not all_finite(tensor) and not all_finite(tensor.t())


@pytest.mark.parametrize("tensor", [torch.empty(0, 3), torch.tensor([1, 2]), torch.tensor(7.0), torch.tensor([True])])
def test_what_holds_no_bad_number_by_nature(tensor: torch.Tensor) -> None:
    assert all_finite(tensor)


def test_a_scalar() -> None:
    assert not all_finite(torch.tensor(float("nan")))


@given(st.lists(st.tuples(st.sampled_from(FLOATS), st.integers(0, 9), st.sampled_from([0.5, *BAD])), max_size=12))
def test_of_many_at_once_the_same_are_found_as_one_by_one(kinds: list[tuple[torch.dtype, int, float]]) -> None:
    tensors = {f"t{i}": torch.full((size, 2), value).to(dtype) for i, (dtype, size, value) in enumerate(kinds)}
    tensors |= {"ids": torch.tensor([1, 2]), "scalar": torch.tensor(float("nan"))}
    assert not_finite(tensors) == [name for name, t in tensors.items() if not all_finite(t)]
