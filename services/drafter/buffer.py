"""HiddenStates kept for drafter training: bounded in bytes in memory, and on disk where a spill folder is given.

Old policy versions leave memory first, for the disk while that has room. A version more than `max_staleness` behind the
newest leaves altogether: its hidden states are those of a target that is not served any more. Nothing that was offered
disappears without being counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from services.config.drafter import DrafterConfig
from services.core.errors import DataError
from services.drafter.spill import SpilledFile, SpillFolder, encode
from services.models.hidden import HiddenStates

# Why a sequence is not kept. `refused`: not taken in (larger than memory's bound, nothing supervised, too old, or older
# than everything in a full buffer). Of those taken in: `evicted` for room, `aged_out`, `damaged` on disk, `unwritten`
# because the disk failed.
Lost = Literal["refused", "evicted", "aged_out", "damaged", "unwritten"]


@dataclass(eq=False)
class _Kept:
    """One sequence: `states` in memory, or `file` on disk."""

    policy_version: int
    length: int
    num_bytes: int  # in memory
    states: HiddenStates | None
    file: SpilledFile | None = None


class HiddenStateBuffer:
    """Never more than `max_bytes` in memory, nor than the spill folder's own bound on disk (a sequence that is read
    back for a micro-step is not kept in memory). Sequences without a supervised token would only cost room and stay
    out."""

    def __init__(self, max_bytes: int, max_staleness: int | None = None, spill: SpillFolder | None = None) -> None:
        self.offered = 0  # sequences since the start: those kept now and those in `lost`
        self.lost: Counter[Lost] = Counter()
        self._max_bytes = max_bytes
        self._max_staleness = max_staleness
        self._spill = spill
        self._items: list[_Kept] = []  # by policy version, then arrival: the order of leaving
        self._by_length: list[_Kept] | None = None  # None: to be sorted again
        self._num_bytes = 0
        self._newest = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self._num_bytes

    @property
    def spilled_bytes(self) -> int:
        return 0 if self._spill is None else self._spill.num_bytes

    @property
    def num_spilled(self) -> int:
        return sum(k.file is not None for k in self._items)

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions present, oldest first."""
        return tuple(sorted({k.policy_version for k in self._items}))

    def add(self, states: Iterable[HiddenStates]) -> int:
        """Take sequences in, making room as the class says; returns how many were taken."""
        offered, refused = self.offered, self.lost["refused"]
        for item in states:
            self.offered += 1
            self._newest = max(self._newest, item.policy_version)
            self._age_out()
            self._take(item)
        return self.offered - offered - (self.lost["refused"] - refused)

    def close(self) -> None:
        """Forget everything, files included."""
        self._items, self._by_length, self._num_bytes = [], None, 0
        if self._spill is not None:
            self._spill.close()

    def _oldest_allowed(self) -> int:
        return 0 if self._max_staleness is None else self._newest - self._max_staleness

    def _age_out(self) -> None:
        while self._items and self._items[0].policy_version < self._oldest_allowed():
            self._drop(self._items[0], "aged_out")

    def _take(self, item: HiddenStates) -> None:
        useless = item.num_bytes > self._max_bytes or not bool(item.loss_mask[2:].any())
        if useless or item.policy_version < self._oldest_allowed():
            self.lost["refused"] += 1
            return
        new = _Kept(item.policy_version, int(item.input_ids.shape[0]), item.num_bytes, item)
        self._insert(new)
        for kept in self._first_to_leave(new):
            self._leave_memory(kept, lost_as="refused" if kept is new else "evicted")

    def _insert(self, new: _Kept) -> None:
        place = len(self._items)
        while place and self._items[place - 1].policy_version > new.policy_version:
            place -= 1
        self._items.insert(place, new)
        self._by_length = None
        self._num_bytes += new.num_bytes

    def _first_to_leave(self, new: _Kept) -> list[_Kept]:
        """From memory, so that the bound holds. When even `new` would have to, nothing leaves for it."""
        leaving, excess = [], self._num_bytes - self._max_bytes
        for kept in self._items:
            if excess <= 0:
                break
            if kept is new:
                return [new]
            if kept.states is not None:
                leaving.append(kept)
                excess -= kept.num_bytes
        return leaving

    def _leave_memory(self, kept: _Kept, lost_as: Lost) -> None:
        """For the disk, if that is there and has room or holds older ones; else it is lost."""
        assert kept.states is not None
        file = None
        if self._spill is not None:
            content = encode(kept.states)
            if self._make_room_on_disk(self._spill, len(content), kept):
                try:
                    file = self._spill.write(content, kept.policy_version)
                except OSError:
                    lost_as = "unwritten"
        if file is None:
            self._drop(kept, lost_as)
            return
        kept.states, kept.file = None, file
        self._num_bytes -= kept.num_bytes

    def _make_room_on_disk(self, spill: SpillFolder, need: int, coming: _Kept) -> bool:
        """Only older ones than `coming` make way for it, and only if that is enough."""
        excess, leaving = spill.num_bytes + need - spill.max_bytes, []
        for kept in self._items:
            if excess <= 0 or kept is coming:
                break
            if kept.file is not None:
                leaving.append(kept)
                excess -= kept.file.num_bytes
        if excess > 0:
            return False
        for kept in leaving:
            self._drop(kept, "evicted")
        return spill.num_bytes + need <= spill.max_bytes  # unless the disk did not let go

    def _drop(self, kept: _Kept, lost_as: Lost) -> None:
        self._items.remove(kept)
        self._by_length = None
        if kept.states is not None:
            self._num_bytes -= kept.num_bytes
        if kept.file is not None and self._spill is not None:
            self._spill.remove(kept.file)
        self.lost[lost_as] += 1

    def sample(self, num_tokens: int, rng: random.Random) -> list[HiddenStates]:
        """About `num_tokens` tokens of distinct sequences, every sequence equally likely.

        Systematic sampling over the sequences sorted by length, one draw per stratum. A sequence holds all positions up
        to its length, so this stratifies by position as well: of the picked sequences, those that reach a position are
        the buffer's share of them to within one, at every position. Late positions are neither missed by chance nor
        drawn more often than they occur: the README has what other weights did. A sequence whose file is damaged is
        dropped, counted, and missing from the sample.
        """
        count = len(self._items)
        if not count:
            return []
        if self._by_length is None:
            self._by_length = sorted(self._items, key=lambda k: k.length)
        by_length = self._by_length
        mean = sum(k.length for k in by_length) / count
        picks = min(count, max(1, round(num_tokens / mean)))
        stride = count / picks
        offset = rng.random()
        chosen = [by_length[min(count - 1, int((k + offset) * stride))] for k in range(picks)]
        return [states for kept in chosen if (states := self._states_of(kept)) is not None]

    def _states_of(self, kept: _Kept) -> HiddenStates | None:
        if kept.file is None or self._spill is None:
            return kept.states
        try:
            return self._spill.read(kept.file)
        except DataError:
            self._drop(kept, "damaged")
            return None


def open_buffer(config: DrafterConfig) -> HiddenStateBuffer:
    """As the section `drafter` describes it. DataError when the spill folder cannot be used."""
    spill = None if config.spill_dir is None else SpillFolder(config.spill_dir, config.spill_bytes)
    return HiddenStateBuffer(config.buffer_bytes, config.max_staleness, spill)
