"""What a strategy selector has learned, in a form that outlives its process. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SelectorState:
    """`learned`: plain values that JSON holds, the selector's own business. `place`: engine, device and model that its
    seconds were measured on."""

    place: str
    learned: Mapping[str, Any]
