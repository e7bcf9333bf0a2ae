from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.config.drafter import DrafterConfig
from services.drafter.buffer import HiddenStateBuffer, open_buffer
from services.drafter.spill import SpillFolder, encode
from services.models.hidden import HiddenStates


def item(length: int, version: int, response: int = 2, aux: bool = False) -> HiddenStates:
    g = torch.Generator().manual_seed(1000 * version + length)
    return HiddenStates(
        torch.arange(length),
        torch.randn(length, 4, generator=g),
        torch.arange(length) >= length - response,
        version,
        torch.randn(length, 12, generator=g) if aux else None,
    )


@contextmanager
def buffer_of(max_bytes: int, spill_bytes: int | None, staleness: int | None = None) -> Iterator[HiddenStateBuffer]:
    with tempfile.TemporaryDirectory() as folder:
        spill = None if spill_bytes is None else SpillFolder(Path(folder), spill_bytes)
        buffer = HiddenStateBuffer(max_bytes, staleness, spill)
        yield buffer
        buffer.close()
        assert not list(Path(folder).iterdir())


def on_disk(buffer: HiddenStateBuffer) -> list[Path]:
    spill = buffer._spill
    return [] if spill is None else sorted(p for p in spill.folder.iterdir() if p.name != "lock")


ADDS = st.lists(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=6), max_size=15)
SPILLS = st.one_of(st.none(), st.integers(200, 6000))


@settings(deadline=None, max_examples=50)
@given(ADDS, st.integers(50, 3000), SPILLS, st.one_of(st.none(), st.integers(0, 4)))
def test_bounds_hold_age_decides_and_nothing_is_lost_uncounted(
    adds: list[list[tuple[int, int]]], bound: int, spill_bytes: int | None, staleness: int | None
) -> None:
    with buffer_of(bound, spill_bytes, staleness) as buffer:
        offered, newest = 0, 0
        for group in adds:
            before, refused = len(buffer), buffer.lost["refused"]
            top = max(buffer.versions, default=-1)
            taken = buffer.add([item(n, v) for n, v in group])
            offered, newest = offered + len(group), max([newest, *(v for _, v in group)])
            kept = buffer._items
            assert buffer.offered == offered == len(buffer) + sum(buffer.lost.values())
            assert taken == len(group) - (buffer.lost["refused"] - refused) and len(buffer) <= before + taken
            assert buffer.num_bytes == sum(k.num_bytes for k in kept if k.states is not None) <= bound
            files = on_disk(buffer)
            assert len(files) == buffer.num_spilled == sum(k.states is None for k in kept)
            assert buffer.spilled_bytes == sum(f.stat().st_size for f in files) <= (spill_bytes or 0)
            versions = [k.policy_version for k in kept]
            assert versions == sorted(versions)
            assert staleness is None or all(v >= newest - staleness for v in versions)
            assert staleness is not None or max(versions, default=-1) >= top, "newer never leaves for older"
        assert buffer.lost["damaged"] == buffer.lost["unwritten"] == 0


@settings(deadline=None, max_examples=50)
@given(ADDS, st.integers(300, 3000))
def test_with_room_on_disk_everything_taken_stays_and_comes_back_as_it_was(
    adds: list[list[tuple[int, int]]], bound: int
) -> None:
    with buffer_of(bound, 2**24) as buffer:
        offered = [item(n, v, aux=n % 2 == 0) for group in adds for n, v in group]
        buffer.add(offered)
        able = [i for i in offered if i.num_bytes <= bound and bool(i.loss_mask[2:].any())]
        assert len(buffer) == len(able) and set(buffer.lost) <= {"refused"}
        found = buffer.sample(10**9, random.Random(0))

        def key(h: HiddenStates) -> tuple[object, ...]:
            return (len(h.input_ids), h.policy_version, h.hidden.tolist(), None if h.aux is None else h.aux.tolist(),
                    h.input_ids.tolist(), h.loss_mask.tolist())  # fmt: skip

        assert sorted(map(str, map(key, found))) == sorted(map(str, map(key, able)))
        assert buffer.num_bytes <= bound, "what is read back is not kept in memory"


def test_oldest_policy_version_leaves_first_whatever_the_order_of_arrival() -> None:
    size = item(10, 0).num_bytes
    buffer = HiddenStateBuffer(3 * size)
    buffer.add([item(10, 2), item(10, 1), item(10, 3)])
    assert buffer.versions == (1, 2, 3)
    assert buffer.add([item(10, 4)]) == 1
    assert buffer.versions == (2, 3, 4)
    assert buffer.add([item(10, 1)]) == 0, "older than everything in a full buffer"
    assert buffer.versions == (2, 3, 4)


def test_nothing_leaves_for_one_that_would_not_fit_anyway() -> None:
    size = item(10, 0).num_bytes
    buffer = HiddenStateBuffer(10 * size)
    buffer.add([item(10, 1), *(item(10, 3) for _ in range(9))])
    assert buffer.add([item(30, 2)]) == 0, "making room would take newer ones"
    assert buffer.versions == (1, 3) and len(buffer) == 10


def test_oldest_leave_memory_for_the_disk_and_the_disk_for_good() -> None:
    size, on_the_disk = item(10, 0).num_bytes, len(encode(item(10, 0)))
    with buffer_of(2 * size, 2 * on_the_disk) as buffer:
        buffer.add(item(10, v) for v in (1, 2, 3, 4))
        assert [(k.policy_version, k.file is not None) for k in buffer._items] == [
            (1, True), (2, True), (3, False), (4, False),
        ]  # fmt: skip
        assert buffer.add([item(10, 5)]) == 1
        assert buffer.versions == (2, 3, 4, 5) and buffer.lost == {"evicted": 1}
        assert buffer.add([item(10, 1)]) == 0 and buffer.versions == (2, 3, 4, 5)


def test_versions_age_out_of_memory_and_disk() -> None:
    size = item(10, 0).num_bytes
    with buffer_of(2 * size, 2**20, staleness=3) as buffer:
        buffer.add(item(10, v) for v in (0, 1, 2, 3))
        assert buffer.versions == (0, 1, 2, 3) and buffer.num_spilled == 2
        buffer.add([item(10, 5)])
        assert buffer.versions == (2, 3, 5) and buffer.lost == {"aged_out": 2}
        assert buffer.add([item(10, 1)]) == 0, "too old when it comes"
        buffer.add([item(10, 100, response=0)])
        assert buffer.versions == () and on_disk(buffer) == [], "news of a version counts, even if nothing is learned"


def test_what_cannot_fit_or_teach_stays_out() -> None:
    buffer = HiddenStateBuffer(1000)
    assert buffer.add([item(10_000, 9), item(10, 0, response=0), item(2, 0, response=2)]) == 0
    assert len(buffer) == buffer.num_bytes == 0 and buffer.lost == {"refused": 3}


@pytest.mark.parametrize("fault", ["missing", "short", "flipped", "folder"])
def test_a_damaged_file_is_dropped_and_counted_and_training_goes_on(fault: str) -> None:
    size = item(10, 0).num_bytes
    with buffer_of(size, 2**20) as buffer:
        buffer.add(item(10, v) for v in range(4))
        first = on_disk(buffer)[0]
        content = first.read_bytes()
        if fault == "flipped":
            first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif fault == "short":
            first.write_bytes(content[:-1])
        else:
            first.unlink()
        if fault == "folder":
            first.mkdir()
        assert sorted(h.policy_version for h in buffer.sample(10**6, random.Random(0))) == [1, 2, 3]
        assert len(buffer) == 3 and buffer.lost == {"damaged": 1}
        assert buffer.spilled_bytes == (3 if fault == "folder" else 2) * len(content), "what cannot be removed counts"
        assert len(buffer.sample(10**6, random.Random(0))) == 3


def test_a_disk_that_takes_nothing_costs_the_sequence_and_is_counted() -> None:
    size = item(10, 0).num_bytes
    with buffer_of(size, 2**20) as buffer:
        buffer.add([item(10, 1)])
        assert buffer._spill is not None
        for file in buffer._spill.folder.iterdir():
            file.unlink()
        buffer._spill.folder.rmdir()
        buffer.add([item(10, 2)])
        assert buffer.versions == (2,) and buffer.lost == {"unwritten": 1} and buffer.spilled_bytes == 0


def test_room_that_the_disk_does_not_give_back_is_not_used_twice() -> None:
    size, on_the_disk = item(10, 0).num_bytes, len(encode(item(10, 0)))
    with buffer_of(size, on_the_disk) as buffer:
        buffer.add([item(10, 1), item(10, 2)])
        (stuck,) = on_disk(buffer)
        stuck.unlink()
        stuck.mkdir()
        buffer.add([item(10, 3)])
        assert buffer.versions == (3,) and buffer.lost == {"evicted": 2} and buffer.spilled_bytes == on_the_disk


def test_empty_buffer_samples_nothing() -> None:
    assert HiddenStateBuffer(1000).sample(100, random.Random(0)) == []


@pytest.mark.parametrize("spilled", [False, True])
def test_sampling_is_even_distinct_and_never_misses_the_tail(spilled: bool) -> None:
    rng = random.Random(5)
    lengths = [rng.randrange(10, 40) for _ in range(90)] + [rng.randrange(200, 300) for _ in range(10)]
    bound = 40_000 if spilled else 2**26
    with buffer_of(bound, 2**26) as buffer:
        buffer.add(item(n, k) for k, n in enumerate(lengths))
        assert (buffer.num_spilled > 0) == spilled and len(buffer) == 100
        seen: dict[int, int] = {}
        tokens = 0
        for k in range(400):
            picked = buffer.sample(1000, random.Random(k))
            names = [p.policy_version for p in picked]
            assert len(set(names)) == len(names)
            assert any(len(p.input_ids) >= 200 for p in picked), "one long response in ten: in every micro-step"
            tokens += sum(len(p.input_ids) for p in picked)
            for name in names:
                seen[name] = seen.get(name, 0) + 1
        assert len(seen) == 100
        assert max(seen.values()) < 2 * min(seen.values())
        assert 800 < tokens / 400 < 1200
        again = [[p.policy_version for p in buffer.sample(500, random.Random(1))] for _ in range(2)]
        assert again[0] == again[1]


@settings(deadline=None)
@given(st.lists(st.integers(4, 300), min_size=1, max_size=60), st.integers(50, 3000), st.integers(0, 2**32))
def test_each_sample_reaches_every_position_in_the_buffers_proportion(
    lengths: list[int], tokens: int, seed: int
) -> None:
    buffer = HiddenStateBuffer(2**26)
    buffer.add(item(n, 0) for n in lengths)
    picked = [len(p.input_ids) for p in buffer.sample(tokens, random.Random(seed))]
    assert len(picked) >= 1
    for position in range(300):
        share = sum(n > position for n in lengths) / len(lengths)
        assert abs(sum(n > position for n in picked) - share * len(picked)) <= 1 + 1e-9


def test_over_time_late_positions_are_trained_on_as_often_as_they_occur() -> None:
    """Early finishers are short: 95 of 100 here. The few long ones hold most of the late tokens and all are drawn."""
    buffer = HiddenStateBuffer(2**26)
    lengths = [20] * 95 + [400] * 5
    buffer.add(item(n, 0) for n in lengths)
    picked = [len(p.input_ids) for k in range(600) for p in buffer.sample(512, random.Random(k))]
    late = sum(max(0, n - 20) for n in picked) / sum(picked)
    assert late == pytest.approx(5 * 380 / sum(lengths), rel=0.1)


def test_a_small_buffer_is_sampled_whole() -> None:
    buffer = HiddenStateBuffer(10**6)
    buffer.add([item(10, 0), item(20, 0)])
    assert len(buffer.sample(10_000, random.Random(0))) == 2


def test_the_configuration_decides_about_age_and_disk(tmp_path: Path) -> None:
    size = item(2000, 0).num_bytes
    config = DrafterConfig(buffer_bytes=2 * size, max_staleness=2, spill_dir=tmp_path / "spill", spill_bytes=2**20)
    buffer = open_buffer(config)
    buffer.add(item(2000, v) for v in range(5))
    assert buffer.versions == (2, 3, 4) and buffer.num_spilled == 1
    buffer.close()
    assert open_buffer(DrafterConfig())._spill is None
