"""A policy on its way, without a connection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from services.core.errors import TransferError
from services.weights.parts import NamedTensors, pack, plan, unpack


@dataclass
class Coming:
    """Tensors as a transfer brings them; nothing comes from part `break_at` on."""

    tensors: Mapping[str, torch.Tensor]
    break_at: int | None = None
    came: int = 0
    closed: int = 0

    def __post_init__(self) -> None:
        self.manifest = plan(self.tensors, 20_000)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.manifest.shapes

    @property
    def num_parts(self) -> int:
        return len(self.manifest.parts)

    def parts(self) -> Iterator[NamedTensors]:
        for n, part in enumerate(self.manifest.parts):
            if n == self.break_at:
                raise TransferError("the other side closed the connection")
            self.came += 1
            yield unpack(part, pack(part, self.tensors, torch.device("cpu"), n), n)

    def close(self) -> None:
        self.closed += 1
