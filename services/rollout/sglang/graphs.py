"""Which CUDA graphs to capture for which depth: plain arithmetic, decided alike in every process of an engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class CapturedGraphs:
    """What the graphs of one depth took: bytes of GPU memory that this process allocated (with the attention
    backend's buffers, without what CUDA itself keeps for them), the fall in the device's free memory (with it, and with
    what other processes took meanwhile), and seconds; for batches of up to `largest` requests, `count` batch sizes."""

    depth: int
    largest: int
    count: int
    bytes: int
    device_bytes: int
    seconds: float


@dataclass(frozen=True)
class GraphPool:
    """Chains of `depths` (0: OFF, always there) on an engine with `max_running` places; the rest as in the section
    `rollout.engine.graphs`."""

    depths: tuple[int, ...]
    max_running: int
    max_nodes: int
    free_nodes: int
    step: float
    memory_bytes: int

    @property
    def deepest(self) -> int:
        return max(self.depths)

    @property
    def logits_rows(self) -> int:
        """Rows that the buffer of logits needs which all graphs share. SGLang 0.5.17 takes all batch sizes times the
        width of its first strategy, which is too few as soon as a deeper one follows."""
        return max(self.largest(depth) * (depth + 1) for depth in self.depths)

    def largest(self, depth: int) -> int:
        """The most running requests for which a chain of `depth` is captured and offered."""
        if depth == 0:
            return self.max_running
        return max(1, min(self.max_running, self.max_nodes // (depth + 1)))

    def sizes(self, depth: int, every: Sequence[int]) -> list[int]:
        """Batch sizes to capture, of those that SGLang would: one is left out where filling up to the following one is
        cheap."""
        largest, sizes = self.largest(depth), [0]
        for size, following in pairwise([*sorted(s for s in every if s < largest), largest]):
            far = following > max(self.step * sizes[-1], sizes[-1] + 1)
            if far or following * (depth + 1) > self.free_nodes:
                sizes.append(size)
        return [*sizes[1:], largest]

    def order(self) -> list[int]:
        """In which depths are captured behind the deepest one, with which SGLang starts: OFF first, since it must be
        there, then upwards."""
        return sorted(depth for depth in self.depths if depth != self.deepest)

    def affords(self, depth: int, every: Sequence[int], known: Collection[CapturedGraphs]) -> bool:
        """Whether the graphs of `depth` fit beside those that are there, if a row costs as much as theirs did."""
        if depth == 0:
            return True
        rows = sum((g.depth + 1) * sum(self.sizes(g.depth, every)) for g in known)
        taken = sum(max(0, g.bytes) for g in known)
        expected = taken * (depth + 1) * sum(self.sizes(depth, every)) / max(1, rows)
        return taken + expected <= self.memory_bytes


def offered(pool: GraphPool, captured: Mapping[int, CapturedGraphs], running: int) -> list[int]:
    """Depths that can be chosen for `running` requests, rising; OFF among them always."""
    return sorted({0, *(d for d in captured if running <= pool.largest(d))})
