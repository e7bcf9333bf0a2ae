"""Stretches of time as records: who held a slot, and which strategy ran there and why. Standard library only; part of
`services.core.types`, which names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.core.pickled import pickled_by_call

Key = tuple[str, str, str, str, bool, int]


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """One coloured bar of the slot timeline, seconds since the start of the run."""

    slot: str
    role: str
    start_s: float
    end_s: float
    label: str = ""


@pickled_by_call
@dataclass(frozen=True, slots=True)
class StrategySpan:
    """Rounds of one server with the same strategy for the same reason.

    `start_s` and `end_s` count from the end of the report that brings the span (so they are 0 or less there), in the
    run folder from the start of the run; `slot` and `label` (the phase: "step 3") are put in on the way. `strategy`: as
    chosen; a round in which its drafter found nothing to propose decoded plainly. `rounds_s`: seconds inside these
    rounds, without prefills and pauses. `verify_steps`: running requests summed over the rounds; `tokens`: committed by
    all requests, bonus included. `on_s`, `off_s`: seconds that the selector predicted for these tokens, with the
    strategy and with OFF; None when it predicted nothing.
    """

    start_s: float
    end_s: float
    strategy: str
    reason: str
    rounds: int
    rounds_s: float
    verify_steps: int
    tokens: int
    running_first: int
    running_last: int
    on_s: float | None = None
    off_s: float | None = None
    slot: str = ""
    label: str = ""

    @property
    def predicted(self) -> bool:
        return self.off_s is not None

    @property
    def key(self) -> Key:
        """Spans with one key are of a kind: they may become one."""
        size = running_bucket(self.running_last)
        return self.slot, self.label, self.strategy, self.reason, self.predicted, size

    @property
    def expected(self) -> float | None:
        """Tokens per second predicted for the strategy; the mean over the tokens' predicted seconds."""
        return self.tokens / self.on_s if self.on_s else None

    @property
    def expected_off(self) -> float | None:
        """The same for OFF."""
        return self.tokens / self.off_s if self.off_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Measured, of all requests, inside rounds."""
        return self.tokens / self.rounds_s if self.rounds_s else None

    def joined(self, later: StrategySpan) -> StrategySpan:
        """Both as one, from this one's start on."""
        assert self.key == later.key, "only spans of a kind are joined"
        return replace(
            self,
            end_s=max(self.end_s, later.end_s),
            rounds=self.rounds + later.rounds,
            rounds_s=self.rounds_s + later.rounds_s,
            verify_steps=self.verify_steps + later.verify_steps,
            tokens=self.tokens + later.tokens,
            running_last=later.running_last,
            on_s=_sum(self.on_s, later.on_s),
            off_s=_sum(self.off_s, later.off_s),
        )

    def moved(self, seconds: float, slot: str = "", label: str = "") -> StrategySpan:
        """As many seconds later, and there."""
        start_s, end_s = self.start_s + seconds, self.end_s + seconds
        return replace(self, start_s=start_s, end_s=end_s, slot=slot or self.slot, label=label or self.label)


def running_bucket(running: int) -> int:
    """0 for 1 running request, 1 for 2, 2 for 3-4, 3 for 5-8, 4 for 9-16, ..."""
    assert running >= 1
    return (running - 1).bit_length()


def bucket_name(bucket: int) -> str:
    """ "1", "2", "3-4", "5-8", ..."""
    return "1" if bucket == 0 else "2" if bucket == 1 else f"{2 ** (bucket - 1) + 1}-{2**bucket}"


def lengthened(spans: Sequence[StrategySpan], new: StrategySpan) -> list[StrategySpan]:
    """`spans` with `new` behind them, as a part of the last one where they are of a kind."""
    if spans and spans[-1].key == new.key:
        return [*spans[:-1], spans[-1].joined(new)]
    return [*spans, new]


def folded(spans: Iterable[StrategySpan], limit: int) -> list[StrategySpan]:
    """`spans` in order of their starts, at most `limit` of them or one of each kind: where there are more, all of a
    kind become one. Nothing but when exactly each of them ran is lost by that."""
    spans = list(spans)
    if len(spans) <= limit:
        return spans
    kinds: dict[Key, StrategySpan] = {}
    for span in spans:
        before = kinds.get(span.key)
        kinds[span.key] = span if before is None else before.joined(span)
    return list(kinds.values())


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
