"""The mapping of a drafter's own vocabulary to the target's, as EAGLE-3 checkpoints store it.

`d2t` int64 [D] holds offsets: row d of the draft head is token d + d2t[d]; `t2d` bool [V] marks those tokens. A mapping
taken for the wrong kind makes every row mean another token, and the loss on the drafter's own ids looks as good as
before (SpecForge#534, verl-SpeCo#67): whatever does not hold together is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.core.errors import DataError
from services.models.files import read_config

D2T, T2D = "d2t", "t2d"


def mapping_tensors(ids: tuple[int, ...], vocab_size: int) -> dict[str, Tensor]:
    """Both tensors for rows that mean the target's tokens `ids`."""
    tokens = torch.tensor(ids)
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[tokens] = True
    return {D2T: tokens - torch.arange(len(ids)), T2D: marks}


def draft_ids(tensors: Mapping[str, Tensor], rows: int, vocab_size: int, where: str) -> tuple[int, ...]:
    """The target's token of each of the draft head's `rows`. A head over the whole vocabulary needs no mapping.

    Raises DataError naming `where` and the tensor for a mapping that is missing or does not hold together."""
    offsets = tensors.get(D2T)
    if offsets is None:
        if rows != vocab_size:
            raise DataError(
                f"{where} has a head of {rows} rows for a target of {vocab_size} tokens, but no {D2T}: nothing tells "
                "which tokens they mean; use the checkpoint that the mapping belongs to"
            )
        return tuple(range(vocab_size))
    if offsets.shape != (rows,) or offsets.is_floating_point() or offsets.is_complex():
        raise DataError(
            f"{where}: {D2T} is {offsets.dtype} {tuple(offsets.shape)}, expected whole numbers ({rows},), an offset "
            "for each row of the head"
        )
    tokens = offsets.long() + torch.arange(rows)
    _check_tokens(tokens, offsets.long(), vocab_size, where)
    _check_marks(tokens, tensors.get(T2D), vocab_size, where)
    return tuple(tokens.tolist())


def _check_tokens(tokens: Tensor, offsets: Tensor, vocab_size: int, where: str) -> None:
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        hint = "; it looks like token ids, not offsets" if bool((offsets.diff() > 0).all()) else ""
        raise DataError(
            f"{where}: {D2T} leads to token {int(tokens.max())}, but the target has {vocab_size}{hint}: row d means "
            f"token d + {D2T}[d], and an identical vocabulary is all zeros"
        )
    if not bool((tokens.diff() > 0).all()):
        raise DataError(
            f"{where}: {D2T} leads two rows to one token, or back: tokens must rise from row to row; use a whole "
            "checkpoint"
        )


def _check_marks(tokens: Tensor, marks: Tensor | None, vocab_size: int, where: str) -> None:
    if marks is None:
        return
    if marks.shape != (vocab_size,):
        raise DataError(f"{where}: {T2D} is {tuple(marks.shape)}, the target has {vocab_size} tokens: use its drafter")
    if not torch.equal(marks.bool().nonzero().flatten(), tokens):
        raise DataError(
            f"{where}: {D2T} and {T2D} name different tokens: one of them was made anew on other data, and the rows of "
            "the head mean what they meant before; use the checkpoint as it was trained"
        )


def read_draft_ids(folder: Path, vocab_size: int) -> tuple[int, ...] | None:
    """Of a drafter folder; None when it shares the target's head. Only the mapping is read."""
    rows = read_config(folder).get("draft_vocab_size")
    if rows is None:
        return None
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys() if name in (D2T, T2D)}  # noqa: SIM118
        except SafetensorError as error:
            raise DataError(f"{file} is damaged or truncated: {error}") from error
    return draft_ids(found, int(rows), vocab_size, str(folder))
