"""The servers of a plan of `consolidation`, kept in the orders in which it asks for them. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """A server in the plan: tokens to go of those that were there and of those that come, and the prefill of these.
    `end_s`: when its last one is expected to end."""

    slot: int
    capacity: int
    stay: Mapping[str, float]
    come: Mapping[str, float] = field(default_factory=dict)
    prefill_s: float = 0.0
    end_s: float = 0.0

    @property
    def count(self) -> int:
        return len(self.stay) + len(self.come)


class LoadOrder:
    """By when they end, and by how full they are. A load that changes is removed and added again."""

    def __init__(self, loads: Iterable[Load]) -> None:
        self._loads = {load.slot: load for load in loads}
        self._by_end = sorted((load.end_s, slot) for slot, load in self._loads.items())
        self._open: list[tuple[int, int]] = []
        self._out = set(self._loads)
        self.all_again()

    def add(self, load: Load) -> None:
        self._loads[load.slot] = load
        insort(self._by_end, (load.end_s, load.slot))
        insort(self._open, _place(load))

    def remove(self, load: Load) -> None:
        del self._loads[load.slot]
        _drop(self._by_end, (load.end_s, load.slot))
        if load.slot in self._out:
            self._out.discard(load.slot)
        else:
            _drop(self._open, _place(load))

    def out(self, load: Load) -> None:
        """No destination until `all_again`."""
        self._out.add(load.slot)
        _drop(self._open, _place(load))

    def all_again(self) -> None:
        if self._out:
            self._out.clear()
            self._open = sorted(map(_place, self._loads.values()))

    def latest_beside(self, *slots: int) -> float:
        """When the last of all other servers ends; 0 without others."""
        return next((end_s for end_s, slot in reversed(self._by_end) if slot not in slots), 0.0)

    def destinations(self, first: int | None) -> Iterator[Load]:
        """`first` before all others, then the fullest first, of those alike the lowest slot. Those that go `out`
        meanwhile are passed over."""
        if first in self._loads and first not in self._out:
            yield self._loads[first]
        at = 0
        while at < len(self._open):
            place = self._open[at]
            if place[1] != first:
                yield self._loads[place[1]]
            if at < len(self._open) and self._open[at] == place:
                at += 1


def _place(load: Load) -> tuple[int, int]:
    return -load.count, load.slot


def _drop(places: list[tuple[float, int]] | list[tuple[int, int]], place: tuple[float, int]) -> None:
    at = bisect_left(places, place)
    assert places[at] == place
    del places[at]
