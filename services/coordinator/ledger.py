"""The book of groups of one rollout phase: which rollouts exist, who generates them, what is still missing.

Whatever dies, every group ends with exactly its indices, each once: a rollout counts when it is first recorded, a
second copy is ignored, and a lost server's open indices go back to the queue with their own seeds. What was withdrawn
from a server in the middle is kept here until it is finished, so that it need not begin again when its next one dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from services.core.types import FinishReason, GroupWork, PartialRollout, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A prompt with all its rollouts in index order, not yet scored."""

    group_id: str
    prompt: Prompt
    rollouts: tuple[Rollout, ...]


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
        self._queue: deque[GroupWork] = deque(works)
        self._finished: deque[FinishedGroup] = deque()
        self._open_groups = len(works)
        self.total = sum(len(w.indices) for w in works)
        self.recorded = 0
        self.duplicates = 0

    @property
    def pending(self) -> tuple[GroupWork, ...]:
        """Work that no server has, oldest first."""
        return tuple(self._queue)

    @property
    def complete(self) -> bool:
        return self._open_groups == 0

    def outstanding(self, slot: int) -> int:
        """Rollouts the slot's server has been given and not yet returned."""
        return sum(1 for e in self._entries.values() for s in e.at.values() if s == slot)

    def held(self, slot: int) -> frozenset[tuple[str, int]]:
        """(group id, index) of what `outstanding` counts."""
        return frozenset((g, i) for g, e in self._entries.items() for i, s in e.at.items() if s == slot)

    def assign(self, work: GroupWork, slot: int) -> None:
        self._queue.remove(work)
        entry = self._entries[work.group_id]
        for index in work.indices:
            assert index not in entry.at and index not in entry.done, f"{work.group_id}#{index} is handed out twice"
            entry.at[index] = slot

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
            self._entries[group_id].at.update(dict.fromkeys(indices, destination))
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
        entry.at.pop(rollout.index, None)
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
        lost = 0
        for entry in reversed(self._entries.values()):
            indices = sorted(i for i, s in entry.at.items() if s == slot)
            if indices:
                self._requeue(entry, indices)
                lost += len(indices)
        return lost

    def give_up(self, slot: int, held: frozenset[tuple[str, int]]) -> int:
        """The slot's server knows nothing of these: queue those again that are still its. Returns how many."""
        lost: dict[str, list[int]] = {}
        for group_id, index in sorted(held & self.held(slot)):
            lost.setdefault(group_id, []).append(index)
        for group_id, indices in lost.items():
            self._requeue(self._entries[group_id], indices)
        return sum(map(len, lost.values()))

    def take_finished(self) -> list[FinishedGroup]:
        taken = list(self._finished)
        self._finished.clear()
        return taken

    def check_integrity(self) -> None:
        """Every index is in exactly one place: queued, at a server, or done; what is queued goes on where it was."""
        queued: dict[str, list[int]] = {}
        for work in self._queue:
            queued.setdefault(work.group_id, []).extend(work.indices)
            assert work == self._entries[work.group_id].part(work.indices), f"{work.group_id}: a partial is lost"
        for group_id, entry in self._entries.items():
            places = [*queued.get(group_id, ()), *entry.at, *entry.done]
            assert sorted(places) == sorted(entry.work.indices), f"{group_id}: {sorted(places)}"
            assert not entry.partials.keys() & entry.done.keys(), f"{group_id}: finished, yet in the middle"

    def _requeue(self, entry: _Entry, indices: Sequence[int]) -> None:
        for index in indices:
            del entry.at[index]
        self._queue.appendleft(entry.part(set(indices)))

    def _unqueue(self, entry: _Entry, index: int) -> None:
        for place, work in enumerate(self._queue):
            if work.group_id == entry.work.group_id and index in work.indices:
                rest = set(work.indices) - {index}
                del self._queue[place]
                if rest:
                    self._queue.insert(place, work.subset(rest))
                return
