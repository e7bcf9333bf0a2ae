"""How long whoever is turned away should stay away: what waits, through how fast it has been getting done."""

from __future__ import annotations

import math
from collections import deque

from services.core.protocols import Clock

SHORTEST_S, LONGEST_S = 1, 60
_KEPT = 64


class Turnover:
    """Remembers when the last choices ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=_KEPT)

    def note(self) -> None:
        self._ended.append(self._clock())

    def retry_after_s(self, waiting: int) -> int:
        """Whole seconds until `waiting` choices will have begun, by the pace of the last ones; within a minute."""
        if len(self._ended) < 2:
            return SHORTEST_S
        per_choice_s = (self._clock() - self._ended[0]) / len(self._ended)
        return min(LONGEST_S, max(SHORTEST_S, math.ceil(waiting * per_choice_s)))
