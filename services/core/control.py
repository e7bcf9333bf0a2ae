"""The control plane carries ids, versions and counts. This guard refuses a message that smuggles tensor data.

Tensors travel by reference (`Blob`), never inside a record: a tensor in a record would be copied through the
coordinator on every hop. Standard library only, so arrays are recognised by the package of their type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from services.core.errors import ControlMessageError

_PLAIN = frozenset({int, float, str, bool, type(None)})
_ARRAY_PACKAGES = frozenset({"torch", "numpy", "jax", "cupy"})


def refuse_tensors(message: Any, what: str) -> None:
    """Raise ControlMessageError, naming the path inside `message`, when it holds array data or raw bytes."""
    kind = type(message)
    if kind in _PLAIN or isinstance(message, Enum | Path):
        return
    is_array = any(base.__module__.partition(".")[0] in _ARRAY_PACKAGES for base in kind.__mro__)  # subclasses too
    if is_array or isinstance(message, bytes | bytearray | memoryview):
        raise ControlMessageError(
            f"{what} holds a {kind.__module__}.{kind.__qualname__}: control messages carry ids, versions and counts; "
            "send tensor data by reference (Blob)"
        )
    for name, part in _parts(message):
        refuse_tensors(part, f"{what}{name}")


def _parts(message: Any) -> Iterable[tuple[str, Any]]:
    if is_dataclass(message) and not isinstance(message, type):
        return [(f".{f.name}", getattr(message, f.name)) for f in fields(message)]
    if isinstance(message, Mapping):
        return [(f"[{k!r}]", part) for k, v in message.items() for part in (k, v)]
    if isinstance(message, list | tuple | set | frozenset):
        # Token ids come in tuples of thousands of integers: look at the set of types, not at each of them.
        if set(map(type, message)) <= _PLAIN:
            return []
        return [(f"[{i}]", part) for i, part in enumerate(message)]
    return []
