"""Which graphs are captured: up to which batch sizes, in which order, within which memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.sglang.graphs import CapturedGraphs, GraphPool, offered

EVERY = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 129, 8)]  # SGLang's, for 128 places
POOLS = st.builds(
    GraphPool,
    depths=st.sets(st.integers(1, 12), min_size=1).map(lambda d: (0, *sorted(d))),
    max_running=st.integers(1, 300),
    max_nodes=st.integers(1, 2000),
    free_nodes=st.integers(0, 2000),
    step=st.sampled_from([1.0, 1.25, 1.5, 2.0]),
    memory_bytes=st.integers(2**20, 2**34),
)


def captured_of(pool: GraphPool, depth: int, bytes_: int) -> CapturedGraphs:
    sizes = pool.sizes(depth, EVERY)
    return CapturedGraphs(depth, sizes[-1], len(sizes), bytes_, bytes_, 1.0)


@given(POOLS)
def test_off_is_there_for_every_batch_and_no_strategy_beyond_its_nodes(pool: GraphPool) -> None:
    assert pool.largest(0) == pool.max_running
    for depth in pool.depths:
        sizes = pool.sizes(depth, EVERY)
        assert sizes == sorted(set(sizes)) and sizes[-1] == pool.largest(depth) <= pool.max_running
        assert depth == 0 or sizes[-1] == 1 or sizes[-1] * (depth + 1) <= pool.max_nodes
        assert set(sizes[:-1]) <= set(EVERY)
        every = sorted({*(s for s in EVERY if s < sizes[-1]), sizes[-1]})
        if pool.step == 1:
            assert sizes == every
        for size, following in pairwise(sizes):
            between = [s for s in every if size < s < following]
            assert not between or following <= max(pool.step * size, size + 1), "padded by more than allowed"
            assert not between or following * (depth + 1) <= pool.free_nodes, "padded where every row costs its share"
    rows = [pool.sizes(d, EVERY)[-1] * (d + 1) for d in pool.depths]
    assert pool.logits_rows == max(rows), "room for the widest graph, and no more"


@given(POOLS, st.integers(1, 300))
def test_what_is_offered_has_graphs_for_the_batch(pool: GraphPool, running: int) -> None:
    captured = {d: captured_of(pool, d, 1) for d in pool.depths if d % 2}
    found = offered(pool, captured, running)
    assert found[0] == 0 and found == sorted(found)
    assert all(d == 0 or (d in captured and running <= captured[d].largest) for d in found)


@given(POOLS)
def test_the_first_state_is_the_deepest_then_off_then_upwards(pool: GraphPool) -> None:
    assert [pool.deepest, *pool.order()] == [max(pool.depths), *sorted(set(pool.depths) - {max(pool.depths)})]


def graphs_of(pool: GraphPool) -> int:
    """Verification and catching up have one each per batch size, a draft of more than one pass another."""
    return sum(len(pool.sizes(d, EVERY)) * (2 + (d > 1)) for d in pool.depths)


def test_sizes_are_rare_where_filling_rows_is_free_and_all_that_there_are_beyond() -> None:
    depths = (0, 1, 3, 5)
    pool, naive = GraphPool(depths, 128, 2048, 384, 1.5, 2**34), GraphPool(depths, 128, 10**9, 0, 1.0, 2**34)
    assert graphs_of(pool) < 0.6 * graphs_of(naive)
    assert pool.sizes(0, EVERY) == [1, 2, 3, 4, 6, 8, 12, 18, 26, 32, 48, 72, 104, 128]
    assert pool.sizes(5, EVERY) == [1, 2, 3, 4, 6, 8, 12, 18, 26, 32, 48, *range(64, 129, 8)]
    assert all(offered(pool, {d: captured_of(pool, d, 1) for d in depths}, n) == [0, 1, 3, 5] for n in range(1, 129))
    assert pool.logits_rows == naive.logits_rows == 128 * 6
    assert GraphPool(depths, 128, 384, 384, 1.5, 2**34).logits_rows == 384


def test_memory_leaves_the_deepest_of_the_others_out_and_never_off() -> None:
    pool = GraphPool((0, 1, 2, 8), 8, 10**6, 0, 1.0, 1000)
    first = captured_of(pool, 8, 500)
    assert pool.affords(0, EVERY, [captured_of(pool, 8, 5000)])
    assert pool.affords(1, EVERY, [first]), "2 of 9 wide: 111 more"
    assert pool.affords(2, EVERY, [first, captured_of(pool, 0, 60), captured_of(pool, 1, 120)])
    assert not pool.affords(2, EVERY, [first, captured_of(pool, 0, 100), captured_of(pool, 1, 250)])
