"""Rows of numbers that hold a few bytes for each instead of a Python object: token ids and log probabilities.

A response has thousands of both, and a coordinator keeps those of all responses of a step: as tuples they take 68 bytes
a token and are pickled, unpickled and looked at by the guard of control messages one by one, packed they take 12 and
travel as they lie. Numbers are made when somebody asks for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, overload

N = TypeVar("N", int, float)

Code = Literal["i", "d"]  # 32-bit integers; 64-bit floats, which are Python's own


class Packed(Sequence[N]):
    """Immutable, and equal to the tuple of its numbers; a slice is a tuple. `data`: as `array(code)` lays them out."""

    __slots__ = ("_data", "code")

    def __init__(self, code: Code, data: bytes) -> None:
        self.code, self._data = code, data

    def _view(self) -> memoryview[Any]:
        return memoryview(self._data).cast(self.code)

    def __len__(self) -> int:
        return len(self._view())

    def __iter__(self) -> Iterator[N]:
        return iter(self._view().tolist())

    @overload
    def __getitem__(self, place: int) -> N: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[N, ...]: ...
    def __getitem__(self, place: int | slice) -> N | tuple[N, ...]:
        if isinstance(place, slice):
            return tuple(self._view()[place].tolist())
        number: N = self._view()[place]
        return number

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed | tuple):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type[Packed[N]], tuple[Code, bytes]]:
        return Packed, (self.code, self._data)


def packed_ids(ids: Iterable[int]) -> Packed[int]:
    """Raises OverflowError for an id that 32 bits do not hold, and TypeError for what is no integer."""
    if isinstance(ids, Packed) and ids.code == "i":
        return ids
    return Packed("i", array("i", ids).tobytes())


def packed_logprobs(logprobs: Iterable[float]) -> Packed[float]:
    """Exactly the numbers given. Raises TypeError for what is none."""
    if isinstance(logprobs, Packed) and logprobs.code == "d":
        return logprobs
    return Packed("d", array("d", logprobs).tobytes())


def kept_ids(ids: Sequence[int]) -> Sequence[int]:
    """As a record keeps them: packed, but a range as it is, which holds nothing for each of its numbers."""
    return ids if isinstance(ids, range) else packed_ids(ids)


def kept_logprobs(logprobs: Sequence[float]) -> Sequence[float]:
    """As `kept_ids`."""
    return logprobs if isinstance(logprobs, range) else packed_logprobs(logprobs)
