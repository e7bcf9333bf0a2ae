"""Rows 26 and 27: the mapping of a drafter's own vocabulary means one thing, and what does not is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from services.core.errors import DataError
from services.models.vocabulary import D2T, T2D, draft_ids, mapping_tensors, read_draft_ids

VOCAB = 12
some_ids = st.sets(st.integers(0, VOCAB - 1), min_size=1).map(lambda ids: tuple(sorted(ids)))


@given(some_ids)
def test_there_and_back(ids: tuple[int, ...]) -> None:
    tensors = mapping_tensors(ids, VOCAB)
    assert tensors[D2T].dtype == torch.int64 and tensors[T2D].dtype == torch.bool
    assert draft_ids(tensors, len(ids), VOCAB, "here") == ids
    assert draft_ids({D2T: tensors[D2T].int()}, len(ids), VOCAB, "here") == ids, "t2d is not needed"


def test_row_27_the_whole_vocabulary_is_all_zeros() -> None:
    """An arange in place of the zeros would map token i to 2i."""
    whole = tuple(range(VOCAB))
    assert not mapping_tensors(whole, VOCAB)[D2T].any()
    assert draft_ids({}, VOCAB, VOCAB, "here") == whole
    with pytest.raises(DataError, match=r"leads to token 22.*looks like token ids, not offsets.*all zeros"):
        draft_ids({D2T: torch.arange(VOCAB)}, VOCAB, VOCAB, "here")


@given(some_ids, some_ids)
def test_row_26_a_mapping_made_anew_is_refused(ids: tuple[int, ...], others: tuple[int, ...]) -> None:
    mixed = {D2T: mapping_tensors(ids, VOCAB)[D2T], T2D: mapping_tensors(others, VOCAB)[T2D]}
    if ids == others:
        assert draft_ids(mixed, len(ids), VOCAB, "here") == ids
        return
    with pytest.raises(DataError, match="d2t and t2d name different tokens"):
        draft_ids(mixed, len(ids), VOCAB, "here")


@given(st.lists(st.integers(-3, VOCAB + 3), min_size=1, max_size=VOCAB))
def test_any_numbers_are_a_mapping_or_are_refused(numbers: list[int]) -> None:
    offsets = torch.tensor(numbers)
    tokens = (offsets + torch.arange(len(numbers))).tolist()
    good = all(0 <= t < VOCAB for t in tokens) and all(a < b for a, b in pairwise(tokens))
    if good:
        assert list(draft_ids({D2T: offsets}, len(numbers), VOCAB, "here")) == tokens
    else:
        with pytest.raises(DataError, match="d2t leads"):
            draft_ids({D2T: offsets}, len(numbers), VOCAB, "here")


@pytest.mark.parametrize(
    ("tensors", "rows", "message"),
    [
        ({}, 4, "head of 4 rows for a target of 12 tokens, but no d2t"),
        ({D2T: torch.zeros(3, dtype=torch.int64)}, 4, r"d2t is torch.int64 \(3,\), expected whole numbers \(4,\)"),
        ({D2T: torch.zeros(4)}, 4, r"d2t is torch.float32"),
        ({D2T: torch.zeros(4, dtype=torch.int64), T2D: torch.ones(9)}, 4, r"t2d is \(9,\), the target has 12 tokens"),
    ],
)
def test_what_is_wrong_is_named(tensors: dict[str, Tensor], rows: int, message: str) -> None:
    with pytest.raises(DataError, match=f"here.*{message}"):
        draft_ids(tensors, rows, VOCAB, "here")


def test_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"draft_vocab_size": None}))
    assert read_draft_ids(tmp_path, VOCAB) is None
    (tmp_path / "config.json").write_text(json.dumps({"draft_vocab_size": 3}))
    save_file(mapping_tensors((1, 5, 11), VOCAB) | {"fc.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert read_draft_ids(tmp_path, VOCAB) == (1, 5, 11)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataError, match="damaged or truncated"):
        read_draft_ids(tmp_path, VOCAB)
