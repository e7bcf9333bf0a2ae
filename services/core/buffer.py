"""What is told of a drafter trainer's buffer. Part of `services.core.types`, which is full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BufferView:
    """What a drafter trainer's buffer holds, and what it has lost since its start by cause, in sequences."""

    num_sequences: int
    num_bytes: int  # in memory
    spilled_bytes: int  # on disk
    lost: Mapping[str, int]
