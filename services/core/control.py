"""The control plane carries ids, versions and counts. This guard refuses a message that smuggles tensor data.

Tensors travel by reference (`Blob`), never inside a record: a tensor in a record would be copied through the
coordinator on every hop. Standard library only, so arrays are recognised by the package of their type. Every message
of thousands of slots passes here: how to look into a type is found out once, and the path is put together only for
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

from services.core.errors import ControlMessageError

_PLAIN = frozenset({int, float, str, bool, type(None)})
_ARRAY_PACKAGES = frozenset({"torch", "numpy", "jax", "cupy"})

Parts = Callable[[Any], Sequence[Any]]


def refuse_tensors(message: Any, what: str) -> None:
    """Raise ControlMessageError, naming the path inside `message`, when it holds array data or raw bytes."""
    if _is_clean(message):
        return
    found = _smuggled(message)
    assert found is not None
    path, kind = found
    raise ControlMessageError(
        f"{what}{path} holds a {kind.__module__}.{kind.__qualname__}: control messages carry ids, versions and "
        "counts; send tensor data by reference (Blob)"
    )


def _is_clean(message: object) -> bool:
    """Layer by layer: all that is in the message, then all that is in that."""
    layer: list[object] = [message]
    while layer:
        parts: list[object] = []
        for thing in layer:
            kind: type = type(thing)
            look = _parts_of(kind)
            if look is None:
                return False
            parts += look(thing)
        layer = [part for part in parts if type(part) not in _PLAIN]
    return True


def _smuggled(message: object) -> tuple[str, type] | None:
    """(path inside `message`, type) of the first thing that does not belong there."""
    kind: type = type(message)
    look = _parts_of(kind)
    if look is None:
        return "", kind
    for place, part in enumerate(look(message)):
        if type(part) not in _PLAIN:
            found = _smuggled(part)
            if found is not None:
                return f"{_name(message, place)}{found[0]}", found[1]
    return None


@lru_cache(maxsize=1024)
def _parts_of(kind: type) -> Parts | None:
    """What to look at in a record, a mapping (keys, then values) or a sequence; nothing in other things. None: it does
    not belong in a message."""
    if _is_array(kind):
        return None
    if is_dataclass(kind):
        return _fields_of(kind)
    if issubclass(kind, Mapping):
        return lambda mapping: (*mapping, *mapping.values())
    if issubclass(kind, list | tuple | set | frozenset):
        return lambda sequence: sequence
    return lambda other: ()


def _fields_of(kind: Any) -> Parts:
    names = [field.name for field in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda record: [getattr(record, name) for name in names]


def _name(message: Any, place: int) -> str:
    """How the part at that place is reached."""
    if is_dataclass(message):
        return f".{fields(message)[place].name}"
    if isinstance(message, Mapping):
        return f"[{list(message)[place % len(message)]!r}]"
    return f"[{place!r}]"


def _is_array(kind: type) -> bool:
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}  # of subclasses too
    return bool(packages & _ARRAY_PACKAGES) or issubclass(kind, bytes | bytearray | memoryview)
