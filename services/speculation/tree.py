"""Shapes of draft trees: which node hangs below which. A chain is the tree with one child per node.

Shapes are fixed before any token is drawn. A shape that depended on sampled tokens would tilt the distribution, since
nodes kept because of their luck are accepted too often.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache

# Assumed acceptance of the best child and how it falls per sibling rank; only the order of nodes depends on it.
_FIRST_CHILD, _RANK_DECAY = 0.7, 0.35


@dataclass(frozen=True)
class TreeShape:
    """`parents[i]` for node i (root: -1). Parents come before children, siblings in the order they are drawn."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.parents[0] == -1 and all(-1 < p < i for i, p in enumerate(self.parents) if i)

    @property
    def num_nodes(self) -> int:
        """Nodes sent to verify, including the root."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, self.num_nodes - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            found[parent].append(node)
        return tuple(tuple(c) for c in found)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes that have children, by depth: what the drafter has to run on, level 0 being the root."""
        inner = [n for n in range(self.num_nodes) if self.children[n]]
        return tuple(tuple(n for n in inner if self.depths[n] == d) for d in range(self.depth))

    def ancestors(self, node: int) -> tuple[int, ...]:
        """The path from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    @cached_property
    def sees(self) -> tuple[tuple[bool, ...], ...]:
        """[Q][Q]: row i is True where node i may attend: its ancestors and itself."""
        paths = [set(self.ancestors(node)) for node in range(self.num_nodes)]
        return tuple(tuple(other in path for other in range(self.num_nodes)) for path in paths)


@lru_cache(maxsize=256)
def tree_shape(depth: int, topk: int, num_draft_tokens: int) -> TreeShape:
    """The `num_draft_tokens` nodes (root included) most likely to be accepted, of a tree at most `depth` deep with at
    most `topk` children per node, when the child of rank r is accepted with probability 0.7 * 0.35^r."""
    nodes: list[tuple[int, int]] = [(-1, 0)]  # (parent, depth)
    heap: list[tuple[float, int, int, int]] = []  # (-score, tie-break, parent, rank)

    def offer(parent: int, rank: int, parent_score: float) -> None:
        if rank < topk and nodes[parent][1] < depth:
            heapq.heappush(heap, (-parent_score * _FIRST_CHILD * _RANK_DECAY**rank, len(heap), parent, rank))

    scores = [1.0]
    offer(0, 0, 1.0)
    while heap and len(nodes) < num_draft_tokens:
        negative, _, parent, rank = heapq.heappop(heap)
        nodes.append((parent, nodes[parent][1] + 1))
        scores.append(-negative)
        offer(parent, rank + 1, scores[parent])
        offer(len(nodes) - 1, 0, -negative)
    return TreeShape(tuple(parent for parent, _ in nodes))


def chain(length: int) -> TreeShape:
    """`length` tokens behind the root."""
    return tree_shape(length, 1, length + 1)


def level_order(shape: TreeShape) -> TreeShape:
    """The same tree numbered breadth first, so that the children of a node are neighbours."""
    order, number = [0], {0: 0}
    for node in order:
        for child in shape.children[node]:
            number[child] = len(order)
            order.append(child)
    return TreeShape(tuple(-1 if n == 0 else number[shape.parents[n]] for n in order))
