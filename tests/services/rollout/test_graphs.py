"""Which graphs are captured: sizes that hold every pass, and a budget."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.graphs import CAPTURE_AFTER, GraphBook, GraphSizes, PassSize, ladder


@given(st.integers(1, 300), st.integers(1, 5000), st.floats(1, 3))
def test_a_ladder_rises_in_steps_and_ends_at_both_ends(least: int, most: int, step: float) -> None:
    sizes = ladder(least, most, step)
    assert sizes[0] == min(least, most) and sizes[-1] == most
    for a, b in pairwise(sizes):
        assert a < b <= max(a + 1, a * step)


@given(st.integers(1, 64), st.integers(1, 20), st.integers(0, 1500), st.integers(1, 400))
def test_a_covering_size_holds_the_pass_and_the_smallest_one_is_taken(
    batch: int, nodes: int, context: int, max_nodes: int
) -> None:
    sizes = GraphSizes(48, 1400, (16, 1, 4), max_nodes, 1.5)
    found = sizes.covering(batch, nodes, context)
    wide = next((n for n in (1, 4, 16) if n >= nodes), None)
    if wide is None or context + wide > 1400 or batch > min(48, max(1, max_nodes // wide)):
        assert found is None
        return
    assert found is not None and found.nodes == wide
    assert found.batch >= batch and found.columns >= context + wide
    assert found.batch <= max(batch, 1.5 * batch) and found.batch * wide <= max(max_nodes, wide)
    assert sizes.covering(*found[:2], found.columns - wide) == found


def test_a_size_is_captured_when_it_comes_again() -> None:
    book, size = GraphBook(2**30), PassSize(1, 4, 256)
    for _ in range(CAPTURE_AFTER):
        assert book.due() is None
        book.asked(size)
    book.asked(PassSize(2, 4, 256))
    assert book.due() == size and book.due() is None


def test_nothing_is_captured_beyond_the_budget() -> None:
    book = GraphBook(100)
    book.captured(PassSize(1, 4, 256), (40, 30), 1.0)
    assert book.affords(PassSize(2, 4, 256)) and not book.affords(PassSize(3, 4, 256))
    book.captured(PassSize(2, 4, 256), (20, 60), 2.0)
    assert not book.affords(PassSize(1, 1, 256)), "100 of 100 bytes are taken"
    for _ in range(CAPTURE_AFTER):
        book.asked(PassSize(1, 1, 256))
    assert book.due() is None
    (part,) = book.parts()
    assert (part.nodes, part.largest, part.count, part.bytes, part.device_bytes, part.seconds) == (4, 2, 2, 60, 90, 3.0)
