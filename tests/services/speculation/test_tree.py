from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.speculation.tree import TreeShape, level_order, tree_shape

SIZES = st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(2, 40))


@given(SIZES)
def test_invariants(size: tuple[int, int, int]) -> None:
    depth, topk, nodes = size
    s = tree_shape(depth, topk, nodes)
    full = 1 + sum(topk**d for d in range(1, depth + 1))
    assert s.num_nodes == min(nodes, full) and s.depth <= depth
    assert s.parents[0] == -1 and s.depths[0] == 0
    for node in range(1, s.num_nodes):
        assert s.parents[node] < node and s.depths[node] == s.depths[s.parents[node]] + 1
    assert all(len(c) <= topk and list(c) == sorted(c) for c in s.children)
    assert sorted(n for c in s.children for n in c) == list(range(1, s.num_nodes))


@given(SIZES)
def test_levels_cover_every_inner_node_parents_first(size: tuple[int, int, int]) -> None:
    s = tree_shape(*size)
    assert [n for level in s.levels for n in level if not s.children[n]] == []
    assert sorted(n for level in s.levels for n in level) == [n for n in range(s.num_nodes) if s.children[n]]
    assert all(s.depths[n] == d for d, level in enumerate(s.levels) for n in level)


@given(SIZES)
def test_a_node_sees_its_ancestors_and_itself(size: tuple[int, int, int]) -> None:
    s = tree_shape(*size)
    for node in range(s.num_nodes):
        path = s.ancestors(node)
        assert path[0] == 0 and path[-1] == node and len(path) == s.depths[node] + 1
        assert [i for i, seen in enumerate(s.sees[node]) if seen] == sorted(path)


@given(SIZES)
def test_the_most_promising_nodes_are_kept(size: tuple[int, int, int]) -> None:
    """No left-out child of a kept node beats a kept one, and a larger budget only adds nodes."""
    depth, topk, nodes = size
    s = tree_shape(depth, topk, nodes)

    def score(parent: int, rank: int) -> float:
        own = 0.7 * 0.35**rank
        return own if parent == 0 else own * score(s.parents[parent], s.children[s.parents[parent]].index(parent))

    kept = [score(s.parents[n], s.children[s.parents[n]].index(n)) for n in range(1, s.num_nodes)]
    left_out = [
        score(n, len(s.children[n])) for n in range(s.num_nodes) if s.depths[n] < depth and len(s.children[n]) < topk
    ]
    assert not left_out or min(kept) >= max(left_out) - 1e-12
    assert tree_shape(depth, topk, nodes + 1).parents[: s.num_nodes] == s.parents


@given(st.integers(1, 12))
def test_topk_1_is_a_chain(depth: int) -> None:
    s = tree_shape(depth, 1, depth + 1)
    assert s.is_chain and s.depth == depth and s.ancestors(depth) == tuple(range(depth + 1))
    assert not tree_shape(2, 2, 5).is_chain


def test_no_draft_is_the_root_alone() -> None:
    s = tree_shape(0, 1, 1)
    assert s.parents == (-1,) and s.is_chain and s.depth == 0 and s.levels == ()


@pytest.mark.parametrize("parents", [(0,), (-1, -1), (-1, 1), (-1, 0, 2), (-1, 0, 3, 0)])
def test_impossible_shapes_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        TreeShape(parents)


@given(SIZES)
def test_level_order_is_the_same_tree_with_siblings_side_by_side(size: tuple[int, int, int]) -> None:
    s = tree_shape(*size)
    ordered = level_order(s)

    def structure(shape: TreeShape, node: int = 0) -> tuple:
        return tuple(structure(shape, child) for child in shape.children[node])

    assert structure(ordered) == structure(s)  # rank by rank: the order in which siblings are drawn is kept
    assert list(ordered.depths) == sorted(ordered.depths)
    drawn = [c for level in ordered.levels for n in level for c in ordered.children[n]]
    assert drawn == list(range(1, s.num_nodes))
