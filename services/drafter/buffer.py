"""HiddenStates kept for drafter training, bounded in bytes. Old policy versions leave first."""

from __future__ import annotations

import random
from collections.abc import Iterable

from services.models.hidden import HiddenStates


class HiddenStateBuffer:
    """Never holds more than `max_bytes`. Sequences without a supervised token would only cost memory and stay out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: list[HiddenStates] = []  # by policy version, then arrival: the eviction order
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions present, oldest first."""
        return tuple(sorted({h.policy_version for h in self._items}))

    def add(self, states: Iterable[HiddenStates]) -> int:
        """Take sequences in, making room by evicting the oldest policy versions; returns how many were taken.

        A sequence that would be evicted at once (older than everything in a full buffer), or that is larger than the
        whole buffer, is not taken.
        """
        taken = 0
        for item in states:
            if item.num_bytes > self._max_bytes or not bool(item.loss_mask[2:].any()):
                continue
            taken += self._make_room(item)
        return taken

    def _make_room(self, item: HiddenStates) -> bool:
        need = self._num_bytes + item.num_bytes - self._max_bytes
        evict = 0
        while need > 0:
            oldest = self._items[evict]
            if oldest.policy_version > item.policy_version:
                return False
            need -= oldest.num_bytes
            evict += 1
        self._num_bytes += item.num_bytes - sum(h.num_bytes for h in self._items[:evict])
        del self._items[:evict]
        place = len(self._items)
        while place and self._items[place - 1].policy_version > item.policy_version:
            place -= 1
        self._items.insert(place, item)
        return True

    def sample(self, num_tokens: int, rng: random.Random) -> list[HiddenStates]:
        """About `num_tokens` tokens of distinct sequences, every sequence equally likely.

        Systematic sampling over the sequences sorted by length: one draw per stratum, so each micro-step sees short
        and long responses in the proportion of the buffer instead of missing the long tail by chance.
        """
        count = len(self._items)
        if not count:
            return []
        by_length = sorted(self._items, key=lambda h: h.input_ids.shape[0])
        mean = sum(h.input_ids.shape[0] for h in by_length) / count
        picks = min(count, max(1, round(num_tokens / mean)))
        stride = count / picks
        offset = rng.random()
        return [by_length[min(count - 1, int((k + offset) * stride))] for k in range(picks)]
