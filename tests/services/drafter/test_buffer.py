from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.drafter.buffer import HiddenStateBuffer
from services.models.hidden import HiddenStates


def item(length: int, version: int, response: int = 2) -> HiddenStates:
    return HiddenStates(
        torch.zeros(length, dtype=torch.int64),
        torch.zeros(length, 4),
        torch.arange(length) >= length - response,
        version,
    )


ADDS = st.lists(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=6), max_size=15)


@given(ADDS, st.integers(50, 3000))
def test_never_over_the_bound_and_never_drops_newer_for_older(adds: list[list[tuple[int, int]]], bound: int) -> None:
    buffer = HiddenStateBuffer(bound)
    for group in adds:
        before, newest = len(buffer), max(buffer.versions, default=-1)
        taken = buffer.add([item(n, v) for n, v in group])
        assert buffer.num_bytes <= bound
        assert buffer.num_bytes == sum(h.num_bytes for h in buffer._items)
        assert len(buffer) <= before + taken
        assert [h.policy_version for h in buffer._items] == sorted(h.policy_version for h in buffer._items)
        if newest >= 0 and taken == 0:
            assert max(buffer.versions) == newest
        assert max(buffer.versions, default=-1) >= newest


def test_oldest_policy_version_leaves_first_whatever_the_order_of_arrival() -> None:
    size = item(10, 0).num_bytes
    buffer = HiddenStateBuffer(3 * size)
    buffer.add([item(10, 2), item(10, 1), item(10, 3)])
    assert buffer.versions == (1, 2, 3)
    assert buffer.add([item(10, 4)]) == 1
    assert buffer.versions == (2, 3, 4)
    assert buffer.add([item(10, 1)]) == 0, "older than everything in a full buffer"
    assert buffer.versions == (2, 3, 4)


def test_what_cannot_fit_or_teach_stays_out() -> None:
    buffer = HiddenStateBuffer(1000)
    assert buffer.add([item(10_000, 9), item(10, 0, response=0), item(2, 0, response=2)]) == 0
    assert len(buffer) == buffer.num_bytes == 0


def test_empty_buffer_samples_nothing() -> None:
    assert HiddenStateBuffer(1000).sample(100, random.Random(0)) == []


def test_sampling_is_even_distinct_and_never_misses_the_tail() -> None:
    rng = random.Random(5)
    buffer = HiddenStateBuffer(2**26)
    lengths = [rng.randrange(10, 40) for _ in range(90)] + [rng.randrange(200, 300) for _ in range(10)]
    buffer.add(item(n, 0) for n in lengths)
    seen: dict[int, int] = {}
    tokens = 0
    for k in range(400):
        picked = buffer.sample(1000, random.Random(k))
        assert len({id(p) for p in picked}) == len(picked)
        assert any(len(p.input_ids) >= 200 for p in picked), "one long response in ten must be in every micro-step"
        tokens += sum(len(p.input_ids) for p in picked)
        for p in picked:
            seen[id(p)] = seen.get(id(p), 0) + 1
    assert len(seen) == 100
    assert max(seen.values()) < 2 * min(seen.values())
    assert 800 < tokens / 400 < 1200
    assert [id(p) for p in buffer.sample(500, random.Random(1))] == [
        id(p) for p in buffer.sample(500, random.Random(1))
    ]


def test_a_small_buffer_is_sampled_whole() -> None:
    buffer = HiddenStateBuffer(10**6)
    buffer.add([item(10, 0), item(20, 0)])
    assert len(buffer.sample(10_000, random.Random(0))) == 2
