"""What a simulated server has done and not told yet, and how much each strategy was used."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.core.spans import running_bucket
from services.core.types import AcceptanceStats, Rollout, StrategySpan
from services.speculation.round import Choice
from services.speculation.strategy import DraftStrategy


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a request that has been there all the time: (rounds, tokens accepted, tokens proposed) by strategy."""

    parts: tuple[tuple[str, float, float, float], ...] = ()

    def plus(self, strategy: DraftStrategy, rounds: float, accepted: float) -> Usage:
        name, proposed = strategy.name, rounds * (strategy.num_draft_tokens - 1)
        kept = tuple(p for p in self.parts if p[0] != name)
        old = next((p for p in self.parts if p[0] == name), (name, 0.0, 0.0, 0.0))
        return Usage((*kept, (name, old[1] + rounds, old[2] + accepted, old[3] + proposed)))

    def since(self, before: Usage) -> AcceptanceStats:
        """As a request's statistics, of what came since `before`. Accepted tokens are spread evenly over the rounds:
        their sum is what counts, not their distribution."""
        known = {p[0]: p for p in before.parts}
        steps, accepted_by, proposed, verify, accepted = dict[str, int](), dict[str, int](), 0.0, 0, 0
        for name, rounds, took, offered in self.parts:
            old = known.get(name, (name, 0.0, 0.0, 0.0))
            count, took = round(rounds - old[1]), round(took - old[2])
            if count <= 0:
                continue
            steps[name] = count
            if name != "off":
                accepted_by[name] = took
                verify, accepted, proposed = verify + count, accepted + took, proposed + offered - old[3]
        return AcceptanceStats(_even(accepted, verify), round(proposed), steps, accepted_by)


NOTHING = Usage()


def _even(total: int, count: int) -> tuple[int, ...]:
    """A histogram of `count` numbers that sum up to `total` and lie next to each other."""
    if not count:
        return ()
    low, more = divmod(total, count)
    return (0,) * low + ((count - more, more) if more else (count,))


@dataclass(slots=True)
class _Stretch:
    """A `StrategySpan` that grows: there are too many to make one of each."""

    start_s: float
    choice: Choice
    bucket: int
    running_first: int
    end_s: float = 0.0
    rounds: int = 0
    rounds_s: float = 0.0
    verify_steps: int = 0
    tokens: float = 0.0
    running_last: int = 0
    on_s: float = 0.0
    off_s: float = 0.0

    def is_like(self, choice: Choice, bucket: int) -> bool:
        mine = self.choice
        return bucket == self.bucket and choice.strategy is mine.strategy and choice.reason == mine.reason

    def add(self, rounds: int, running: int, tokens: float, seconds: float, choice: Choice) -> None:
        self.rounds += rounds
        self.rounds_s += seconds
        self.end_s += seconds
        self.verify_steps += rounds * running
        self.tokens += tokens
        self.running_last = running
        self.on_s += tokens / choice.expected  # NaN where nothing is predicted
        self.off_s += tokens / choice.expected_off

    def span(self, moved_s: float) -> StrategySpan:
        """On another clock, whose zero was `moved_s` earlier."""
        predicted = math.isfinite(self.on_s)
        return StrategySpan(
            self.start_s + moved_s, self.end_s + moved_s, self.choice.strategy.name, self.choice.reason,
            self.rounds, self.rounds_s, self.verify_steps, round(self.tokens), self.running_first, self.running_last,
            self.on_s if predicted else None, self.off_s if predicted else None,
        )  # fmt: skip


@dataclass(slots=True)
class Told:
    """`begin` for each report; `usage` goes on."""

    usage: Usage = NOTHING
    finished: list[Rollout] = field(default_factory=list)
    stretches: list[_Stretch] = field(default_factory=list)
    tokens: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0

    def begin(self) -> None:
        self.finished, self.stretches, self.tokens = [], [], 0.0
        self.prefill_tokens, self.prefill_s = 0, 0.0

    def spans(self, moved_s: float) -> tuple[StrategySpan, ...]:
        return tuple([stretch.span(moved_s) for stretch in self.stretches])

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.prefill_tokens += tokens
        self.prefill_s += seconds

    def stretch(
        self,
        strategy: DraftStrategy,
        rounds: int,
        tokens: float,
        running: int,
        seconds: float,
        choice: Choice,
        start_s: float,
    ) -> None:
        """`tokens`: of a request in a round; `start_s` since the report began."""
        self.usage = self.usage.plus(strategy, rounds, rounds * (tokens - 1))
        made, bucket = rounds * tokens * running, running_bucket(running)
        self.tokens += made
        if not (self.stretches and self.stretches[-1].is_like(choice, bucket)):
            self.stretches.append(_Stretch(start_s, choice, bucket, running, start_s))
        self.stretches[-1].add(rounds, running, made, seconds, choice)
