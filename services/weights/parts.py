"""A version of weights as a row of parts: what travels at once, and what lies on a device beside the model meanwhile.

A part is one buffer of bytes in which its tensors lie one after the other, so any number format travels bit for bit and
a transport sends few large messages instead of many small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, UntypedStorage

from services.core.errors import TransferError, WeightError

WORD = 8  # bytes; a part ends with one that seals the others
ALIGN = 256  # what CUDA's own allocator aligns to; a tensor seen in place must at least be aligned to its items

NamedTensors = list[tuple[str, Tensor]]


class Incoming(Protocol):
    """Weights of one version that are still on their way. Names and shapes are known before anything comes."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def num_parts(self) -> int: ...

    def parts(self) -> Iterator[NamedTensors]:
        """Each part as it comes, once. Raises TransferError when one does not come."""

    def close(self) -> None:
        """End the transfer where it is, also while another thread waits for a part. Nothing when it came to its end."""


class Placed(NamedTuple):
    """One tensor: name, number format as torch spells it ("bfloat16"), and where in its part's bytes it lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @classmethod
    def of(cls, name: str, tensor: Tensor, start: int) -> Self:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(tensor.shape), start, tensor.numel() * tensor.element_size())

    def seen_in(self, buffer: Tensor) -> Tensor:
        """In place. Raises WeightError for a number format that torch does not have."""
        return buffer[self.start : self.start + self.num_bytes].view(_dtype(self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class Part:
    num_bytes: int
    tensors: tuple[Placed, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a version but its numbers."""

    parts: tuple[Part, ...]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {placed.name: placed.shape for part in self.parts for placed in part.tensors}

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def plan(tensors: Mapping[str, Tensor], part_bytes: int) -> Manifest:
    """In the order given, a new part whenever the next tensor would exceed `part_bytes`; a larger tensor is a part of
    its own."""
    parts: list[Part] = []
    placed: list[Placed] = []
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if placed and _aligned(end) + size > part_bytes:
            parts.append(Part(end, tuple(placed)))
            placed, end = [], 0
        placed.append(Placed.of(name, tensor, _aligned(end)))
        end = _aligned(end) + size
    return Manifest((*parts, Part(end, tuple(placed)))) if placed else Manifest(tuple(parts))


def sealed_bytes(part: Part) -> int:
    """What travels: the part's bytes, filled up to whole words, and its seal."""
    return -(-part.num_bytes // WORD) * WORD + WORD


def pack(part: Part, tensors: Mapping[str, Tensor], device: torch.device, mark: int) -> Tensor:
    """The part's bytes on `device`, sealed: the last word is `mark` plus the sum of the others. An aborted NCCL
    transfer looks like a finished one to torch, and its buffer may hold an earlier part."""
    buffer = torch.empty(sealed_bytes(part), dtype=torch.uint8, device=device)
    for placed in part.tensors:
        source = tensors[placed.name].detach().reshape(-1).view(torch.uint8)
        buffer[placed.start : placed.start + placed.num_bytes].copy_(source)
    words = buffer.view(torch.int64)
    words[-1] = words[:-1].sum() + mark
    return buffer


def unpack(part: Part, buffer: Tensor, mark: int) -> NamedTensors:
    """The part's tensors, seen in place in its bytes. Raises TransferError when the seal is broken, WeightError for a
    number format that torch does not have."""
    words = buffer.view(torch.int64)
    if not bool(words[-1] == words[:-1].sum() + mark):
        raise TransferError(f"a part of {part.num_bytes} bytes arrived damaged or not at all")
    return [(placed.name, placed.seen_in(buffer)) for placed in part.tensors]


def bytes_of(storage: UntypedStorage) -> Tensor:
    """All of it, uint8, in place."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"weights in number format {name!r}, which torch {torch.__version__} does not have")
    return dtype


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN
