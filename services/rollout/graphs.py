"""Which CUDA graphs of the target's pass the native engine captures, and when: plain arithmetic.

A graph is of one size: batch, nodes per row and columns that attention reads. What is smaller runs in it padded. Sizes
are captured as they are needed, and strategies with as many nodes share them: the shape of a tree is an input.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

LEAST_COLUMNS, COLUMN_STEP = 256, 2.0
# Twice: a size that came once and again will come more often. Calibration counts the better of two rounds behind one
# that warms up, so the second of them has its graph.
CAPTURE_AFTER = 2


class PassSize(NamedTuple):
    batch: int
    nodes: int
    columns: int


@dataclass(frozen=True)
class GraphPart:
    """What the graphs of one number of nodes took: bytes that torch reserved, the fall in the device's free memory
    (with what CUDA itself keeps, and with what others took meanwhile), and seconds; for up to `largest` rows, `count`
    sizes.
    """

    nodes: int
    largest: int
    count: int
    bytes: int
    device_bytes: int
    seconds: float


def ladder(least: int, most: int, step: float) -> tuple[int, ...]:
    """Rising sizes from `least` to `most`, both included, each at most `step` times the one before or one more."""
    sizes = [min(least, most)]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, int(sizes[-1] * step))))
    return tuple(sizes)


@dataclass(frozen=True)
class GraphSizes:
    """Of an engine with `max_running` rows of `max_columns`. `nodes`: numbers of nodes that its strategies send to the
    target; `max_nodes` of a graph, all rows together; neighbouring batch sizes differ by the factor `step` at most."""

    max_running: int
    max_columns: int
    nodes: tuple[int, ...]
    max_nodes: int
    step: float

    def covering(self, batch: int, nodes: int, context: int) -> PassSize | None:
        """The smallest that holds `batch` rows of `nodes` behind `context` columns; None: none does."""
        wide = _at_least(sorted(set(self.nodes)), nodes)
        if wide is None:
            return None
        rows = _at_least(ladder(1, min(self.max_running, max(1, self.max_nodes // wide)), self.step), batch)
        columns = _at_least(ladder(LEAST_COLUMNS, self.max_columns, COLUMN_STEP), context + wide)
        return None if rows is None or columns is None else PassSize(rows, wide, columns)


def _at_least(rising: Iterable[int], least: int) -> int | None:
    sizes = tuple(rising)
    at = bisect_left(sizes, least)
    return sizes[at] if at < len(sizes) else None


class GraphBook:
    """Which sizes were asked for and what the captured ones took: no further one when they hold `memory_bytes`. The
    last one can exceed it by what it takes beyond the estimate; for the first one there is no estimate."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._asked: dict[PassSize, int] = {}
        self._due: deque[PassSize] = deque()
        self._parts: dict[PassSize, GraphPart] = {}

    def asked(self, size: PassSize) -> None:
        """A pass of this size ran without a graph."""
        self._asked[size] = self._asked.get(size, 0) + 1
        if self._asked[size] == CAPTURE_AFTER:
            self._due.append(size)

    def due(self) -> PassSize | None:
        """The next one to capture. One that the memory is too small for is not named again."""
        while self._due:
            size = self._due.popleft()
            if self.affords(size):
                return size
        return None

    def affords(self, size: PassSize) -> bool:
        """If the memory of a graph grows with its nodes times its columns, as that of the largest one did."""
        taken = sum(max(0, p.bytes, p.device_bytes) for p in self._parts.values())
        most = max((max(0, p.bytes, p.device_bytes) / _extent(s) for s, p in self._parts.items()), default=0.0)
        largest = max(map(_extent, self._parts), default=0)
        return taken + most * max(0, _extent(size) - largest) <= self._memory_bytes and taken < self._memory_bytes

    def emptied(self) -> GraphBook:
        """The same memory, nothing in it and nothing asked for yet."""
        return GraphBook(self._memory_bytes)

    def captured(self, size: PassSize, taken: tuple[int, int], seconds: float) -> None:
        """`taken`: (bytes reserved, bytes of the device)."""
        self._parts[size] = GraphPart(size.nodes, size.batch, 1, *taken, seconds)

    def parts(self) -> tuple[GraphPart, ...]:
        """By number of nodes, rising."""
        found: dict[int, list[GraphPart]] = {}
        for part in self._parts.values():
            found.setdefault(part.nodes, []).append(part)
        return tuple(_together(found[nodes]) for nodes in sorted(found))


def _extent(size: PassSize) -> int:
    return size.batch * size.nodes * size.columns


def _together(parts: list[GraphPart]) -> GraphPart:
    return GraphPart(
        parts[0].nodes,
        max(p.largest for p in parts),
        len(parts),
        sum(p.bytes for p in parts),
        sum(p.device_bytes for p in parts),
        sum(p.seconds for p in parts),
    )
