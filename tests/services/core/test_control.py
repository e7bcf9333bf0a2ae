"""The control plane carries ids, versions and counts; a tensor smuggled into a message is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from services.core.control import refuse_tensors
from services.core.errors import ControlMessageError
from services.core.types import (
    DrafterProgress,
    FinishReason,
    GroupWork,
    HiddenStateChunk,
    Prompt,
    SamplingParams,
    ServedVersions,
    SlotLease,
    SlotState,
)

PROMPT = Prompt("p", "1 + 1=", (1, 2, 3), "2", "chain_sum", {"difficulty": {"num_terms": (2, 2)}})
WORK = GroupWork("g", PROMPT, (0, 1), (7, 8), SamplingParams(stop_strings=("END",)))


class Labelled(torch.Tensor):
    """A tensor by another name."""


class Pair(NamedTuple):
    name: str
    value: Any


@pytest.mark.parametrize(
    "message",
    [
        [WORK, WORK],
        ServedVersions(3, None),
        SlotLease(0, SlotState.DRAFTING, 4, 12.5),
        HiddenStateChunk(policy_version=1, step=2, num_sequences=3, num_tokens=4, num_bytes=5),
        DrafterProgress(1, 2, 3, 0.5, (0.9, 0.8), 0.1),
        (("eagle_3_1_4", 4), {"server": "rollout-0"}, FinishReason.STOP, Path("runs"), None, 1.5),
    ],
    ids=lambda m: type(m).__name__,
)
def test_plain_records_pass(message: Any) -> None:
    refuse_tensors(message, "message")


TENSORS: dict[str, Any] = {
    "tensor": torch.zeros(2),
    "scalar": torch.tensor(1.0),
    "parameter": torch.nn.Parameter(torch.zeros(1)),
    "subclass": torch.zeros(2).as_subclass(Labelled),
    "array": np.zeros(2),
    "numpy number": np.float32(1.0),
    "bytes": b"\x00" * 8,
    "view": memoryview(b"\x00"),
}
WRAPPED: dict[str, Any] = {
    "bare": lambda t: t,
    "list": lambda t: [1, t],
    "key of a tuple of ids": lambda t: (1, 2, 3, t),
    "mapping": lambda t: {"a": {"b": t}},
    "record": lambda t: dataclasses.replace(PROMPT, meta={"extra": t}),
    "record in a record": lambda t: [dataclasses.replace(WORK, prompt=dataclasses.replace(PROMPT, token_ids=(1, t)))],
    "named tuple": lambda t: Pair("x", t),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_smuggled_tensors_are_refused(tensor: Any, wrap: Any) -> None:
    with pytest.raises(ControlMessageError, match="send tensor data by reference"):
        refuse_tensors(wrap(tensor), "submit")


def test_the_error_says_where() -> None:
    with pytest.raises(ControlMessageError, match=r"submit\[0\]\.prompt\.meta\['extra'\] holds a torch\.Tensor"):
        message = [dataclasses.replace(WORK, prompt=dataclasses.replace(PROMPT, meta={"extra": torch.zeros(1)}))]
        refuse_tensors(message, "submit")
