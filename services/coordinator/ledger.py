"""The book of groups of one rollout phase: which rollouts exist, who generates them, what is still missing.

Whatever dies, every group ends with exactly its indices, each once: a rollout counts when it is first recorded, a
second copy is ignored, and a lost server's open indices go back to the queue with their own seeds. What was withdrawn
from a server in the middle is kept here until it is finished, so that it need not begin again when its next one dies.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from services.core.types import FinishReason, GroupWork, PartialRollout, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A prompt with all its rollouts in index order, not yet scored."""

    group_id: str
    prompt: Prompt
    rollouts: tuple[Rollout, ...]


_Key = tuple[str, tuple[int, ...]]  # of queued work: no index is queued twice


def _key(work: GroupWork) -> _Key:
    return work.group_id, work.indices


@dataclass(slots=True)
class _Entry:
    work: GroupWork
    done: dict[int, Rollout] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)  # open index -> slot that generates it
    partials: dict[int, PartialRollout] = field(default_factory=dict)  # open index -> what was withdrawn of it

    def part(self, indices: Collection[int]) -> GroupWork:
        """Work of these indices, each from where it is."""
        begun = tuple(self.partials[i] for i in self.work.indices if i in indices and i in self.partials)
        return replace(self.work.subset(indices), partials=begun)


class Ledger:
    def __init__(self, works: Sequence[GroupWork]) -> None:
        self._entries = {w.group_id: _Entry(w) for w in works}
        assert len(self._entries) == len(works), "group ids must be unique"
        self._queue: OrderedDict[_Key, GroupWork] = OrderedDict((_key(w), w) for w in works)
        self._held: defaultdict[int, set[tuple[str, int]]] = defaultdict(set)  # slot -> what `outstanding` counts
        self.touched: set[int] = set()  # slots whose part changed since whoever looks cleared it
        self._finished: deque[FinishedGroup] = deque()
        self._open_groups = len(works)
        self.total = sum(len(w.indices) for w in works)
        self.recorded = 0
        self.duplicates = 0

    @property
    def pending(self) -> tuple[GroupWork, ...]:
        """Work that no server has, oldest first."""
        return tuple(self._queue.values())

    def queues(self, work: GroupWork) -> bool:
        """Whether it is pending still, as it is."""
        return self._queue.get(_key(work)) is work

    @property
    def complete(self) -> bool:
        return self._open_groups == 0

    def outstanding(self, slot: int) -> int:
        """Rollouts the slot's server has been given and not yet returned."""
        return len(self._held[slot])

    def held(self, slot: int) -> frozenset[tuple[str, int]]:
        """(group id, index) of what `outstanding` counts."""
        return frozenset(self._held[slot])

    def assign(self, work: GroupWork, slot: int) -> None:
        del self._queue[_key(work)]
        entry = self._entries[work.group_id]
        for index in work.indices:
            assert index not in entry.at and index not in entry.done, f"{work.group_id}#{index} is handed out twice"
            self._put(entry, index, slot)

    def work_of(self, rollout_id: str) -> GroupWork | None:
        """The whole group's work that the rollout is of; None when it is of another phase."""
        entry = self._entries.get(rollout_id.rpartition("#")[0])
        return entry.work if entry is not None else None

    def move(self, partials: Sequence[PartialRollout], source: int, destination: int | None) -> list[GroupWork]:
        """Open rollouts that `source` handed back now belong to `destination`, which gets the work returned; without
        one they are queued again. What `source` does not have any more (it came otherwise) is passed over."""
        moved: dict[str, list[int]] = {}
        for partial in partials:
            entry = self._entries.get(partial.group_id)
            if entry is not None and entry.at.get(partial.index) == source:
                entry.partials.pop(partial.index, None)
                if partial.response_ids:
                    entry.partials[partial.index] = partial
                moved.setdefault(partial.group_id, []).append(partial.index)
        if destination is None:
            for group_id, indices in moved.items():
                self._requeue(self._entries[group_id], indices)
            return []
        for group_id, indices in moved.items():
            for index in indices:
                self._take(self._entries[group_id], index)
                self._put(self._entries[group_id], index, destination)
        return [self._entries[group_id].part(indices) for group_id, indices in moved.items()]

    def record(self, rollout: Rollout, slot: int) -> bool:
        """Take one finished rollout; False when it is a late duplicate, unknown, or aborted (then queued again)."""
        entry = self._entries.get(rollout.group_id)
        if entry is None or rollout.index in entry.done or rollout.index not in entry.work.indices:
            self.duplicates += 1
            return False
        if rollout.finish_reason is FinishReason.ABORT:
            if entry.at.get(rollout.index) == slot:
                self._requeue(entry, [rollout.index])
            return False
        if rollout.index not in entry.at:
            # It was given up for lost and queued again, yet here it is: keep it and take it out of the queue.
            self._unqueue(entry, rollout.index)
        else:
            self._take(entry, rollout.index)
        entry.partials.pop(rollout.index, None)
        entry.done[rollout.index] = rollout
        self.recorded += 1
        if len(entry.done) == len(entry.work.indices):
            ordered = tuple(entry.done[i] for i in sorted(entry.done))
            self._finished.append(FinishedGroup(entry.work.group_id, entry.work.prompt, ordered))
            self._open_groups -= 1
        return True

    def lose(self, slot: int) -> int:
        """The slot's server is gone: queue its open indices again, first in line, with their seeds and what is kept
        of them. Returns how many."""
        return self._requeue_all(self._held[slot])

    def give_up(self, slot: int, held: frozenset[tuple[str, int]]) -> int:
        """The slot's server knows nothing of these: queue those again that are still its. Returns how many."""
        return self._requeue_all(held & self._held[slot])

    def take_finished(self) -> list[FinishedGroup]:
        taken = list(self._finished)
        self._finished.clear()
        return taken

    def check_integrity(self) -> None:
        """Every index is in exactly one place: queued, at a server, or done; what is queued goes on where it was."""
        queued: dict[str, list[int]] = {}
        for work in self._queue.values():
            queued.setdefault(work.group_id, []).extend(work.indices)
            assert work == self._entries[work.group_id].part(work.indices), f"{work.group_id}: a partial is lost"
        for group_id, entry in self._entries.items():
            places = [*queued.get(group_id, ()), *entry.at, *entry.done]
            assert sorted(places) == sorted(entry.work.indices), f"{group_id}: {sorted(places)}"
            assert not entry.partials.keys() & entry.done.keys(), f"{group_id}: finished, yet in the middle"
        held = {(g, i, s) for g, e in self._entries.items() for i, s in e.at.items()}
        assert held == {(g, i, s) for s, part in self._held.items() for g, i in part}, "a slot's part is not its own"

    def _put(self, entry: _Entry, index: int, slot: int) -> None:
        entry.at[index] = slot
        self._held[slot].add((entry.work.group_id, index))
        self.touched.add(slot)

    def _take(self, entry: _Entry, index: int) -> None:
        slot = entry.at.pop(index)
        self._held[slot].discard((entry.work.group_id, index))
        self.touched.add(slot)

    def _requeue_all(self, parts: Collection[tuple[str, int]]) -> int:
        """First in line, the first group first. Returns how many rollouts."""
        by_group: dict[str, list[int]] = {}
        for group_id, index in sorted(parts, reverse=True):
            by_group.setdefault(group_id, []).append(index)
        for group_id, indices in by_group.items():
            self._requeue(self._entries[group_id], indices)
        return sum(map(len, by_group.values()))

    def _requeue(self, entry: _Entry, indices: Sequence[int]) -> None:
        for index in indices:
            self._take(entry, index)
        work = entry.part(set(indices))
        self._queue[_key(work)] = work
        self._queue.move_to_end(_key(work), last=False)

    def _unqueue(self, entry: _Entry, index: int) -> None:
        group_id = entry.work.group_id
        found = next(key for key in self._queue if key[0] == group_id and index in key[1])
        rest = set(found[1]) - {index}
        works = [w if _key(w) != found else w.subset(rest) for w in self._queue.values() if _key(w) != found or rest]
        self._queue = OrderedDict((_key(w), w) for w in works)
