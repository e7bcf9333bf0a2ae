"""How many tokens a running request will still bring, so that a price paid once can be spread over them; and how often
a token is the last one, so that drafts are not credited with what a stop cuts off."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.speculation.round import RoundOutcome

_PRIOR_TOKENS = 256.0  # per request that ended, before any did
_KEEP_ENDS = 64.0  # requests whose ends are remembered
_KEEP_TRIES = 2000.0  # accepted drafts behind which a token might be cut off
_DOUBT_TRIES = 100.0  # what knowing nothing is worth of them


class Lifetime:
    """Tokens committed per request that ended. For lengths without memory that is what each has still to bring; in a
    long tail those left have more, so it is careful there. Requests that come while others end hide ends, which makes
    it bold while a batch is being filled up."""

    def __init__(self) -> None:
        self._tokens, self._ends, self._running = _PRIOR_TOKENS, 1.0, 0

    def state(self) -> list[float]:
        return [self._tokens, self._ends, self._running]

    @classmethod
    def of(cls, state: Sequence[float]) -> Lifetime:
        life = cls()
        life._tokens, life._ends = state[0], state[1]
        life._running = int(state[2])
        return life

    @property
    def tokens(self) -> float:
        """Expected, per request."""
        return self._tokens / self._ends

    def observe(self, outcome: RoundOutcome) -> None:
        ended = max(0, self._running - outcome.view.running)
        keep = (1 - 1 / _KEEP_ENDS) ** ended
        self._tokens = keep * self._tokens + outcome.tokens
        self._ends = keep * self._ends + ended
        self._running = outcome.view.running


class Ends:
    """The chance of a token to be the last one of its response. Of a request with a drafts accepted, k = 1 .. a of its
    tokens are lost if the one k places before the last is the end: a (a + 1) / 2 chances. With short responses what is
    cut off is several per cent of what drafts bring, and nothing of what OFF does. `Lifetime` does not see it while
    requests come as others end."""

    def __init__(self) -> None:
        self._lost = self._tries = 0.0

    def state(self) -> list[float]:
        return [self._lost, self._tries]

    @classmethod
    def of(cls, state: Sequence[float]) -> Ends:
        ends = cls()
        ends._lost, ends._tries = state
        return ends

    @property
    def rate(self) -> float:
        return self._lost / (self._tries + _DOUBT_TRIES)

    def observe(self, outcome: RoundOutcome) -> None:
        tries = sum(k * count for k, count in enumerate(outcome.accepted, start=1))
        keep = math.exp(-tries / _KEEP_TRIES)
        self._lost, self._tries = keep * self._lost + outcome.cut, keep * self._tries + tries
