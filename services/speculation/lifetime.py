"""How many tokens a running request will still bring, so that a price paid once can be spread over them."""

from __future__ import annotations

from collections.abc import Sequence

from services.speculation.round import RoundOutcome

_PRIOR_TOKENS = 256.0  # per request that ended, before any did
_KEEP_ENDS = 64.0  # requests whose ends are remembered


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
