"""The control plane carries ids, versions and counts. This guard refuses a message that smuggles tensor data.

Tensors travel by reference (`Blob`), never inside a record: a tensor in a record would be copied through the
coordinator on every hop. Standard library only, so arrays are recognised by the package of their type. Every message
of thousands of slots passes here: what a type is, is looked up once, and the path is put together only for an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from services.core.errors import ControlMessageError

_PLAIN = frozenset({int, float, str, bool, type(None)})
_ARRAY_PACKAGES = frozenset({"torch", "numpy", "jax", "cupy"})


def refuse_tensors(message: Any, what: str) -> None:
    """Raise ControlMessageError, naming the path inside `message`, when it holds array data or raw bytes."""
    found = _smuggled(message)
    if found is not None:
        path, kind = found
        raise ControlMessageError(
            f"{what}{path} holds a {kind.__module__}.{kind.__qualname__}: control messages carry ids, versions and "
            "counts; send tensor data by reference (Blob)"
        )


def _smuggled(message: object) -> tuple[str, type] | None:
    """(path inside `message`, type) of the first thing that does not belong there."""
    kind: type = type(message)
    if kind in _PLAIN or _is_plain(kind):
        return None
    if _is_array(kind):
        return "", kind
    for name, part in _parts(message, kind):
        if type(part) in _PLAIN:
            continue
        found = _smuggled(part)
        if found is not None:
            return f"{_said(name)}{found[0]}", found[1]
    return None


def _parts(message: object, kind: type) -> Iterable[tuple[Any, Any]]:
    """(field name, or place in brackets, part) of a record, a mapping or a sequence."""
    names = _field_names(kind)
    if names is not None:
        return [(name, getattr(message, name)) for name in names]
    if isinstance(message, Mapping):
        return [([k], part) for k, v in message.items() for part in (k, v)]
    if isinstance(message, list | tuple | set | frozenset):
        # Token ids come in tuples of thousands of integers: look at the set of types, not at each of them.
        if set(map(type, message)) <= _PLAIN:
            return []
        return [([i], part) for i, part in enumerate(message)]
    return []


def _said(name: Any) -> str:
    return f".{name}" if isinstance(name, str) else f"[{name[0]!r}]"


@lru_cache(maxsize=1024)
def _is_plain(kind: type) -> bool:
    return issubclass(kind, Enum | Path)


@lru_cache(maxsize=1024)
def _is_array(kind: type) -> bool:
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}  # of subclasses too
    return bool(packages & _ARRAY_PACKAGES) or issubclass(kind, bytes | bytearray | memoryview)


@lru_cache(maxsize=1024)
def _field_names(kind: type) -> tuple[str, ...] | None:
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else None
