"""Which strategy SGLang's next round uses, and what the selector is told of a round: plain Python, in SGLang's
scheduler process (see `switching`).

SGLang launches a round before it has read the results of the one before, so a choice never knows the last round. A
round's wall time is taken where its results are read anyway: from the moment the batch before it was read (a prefill
counts as one) or from its own launch, whichever is later, to the moment it was read. The differences of moments seen on
the CPU are late by the same lag, so over rounds in a row they are the GPU's.

The first round of a depth in a process compiles kernels (half a second on an H200 for a chain of 12, whose rounds take
8 ms from then on), and that of each of its graphs loads the graph (a tenth of one). Such a round says nothing about its
strategy and is kept from the selector, which would avoid that one for long: the first of a depth with so many requests,
if it takes several times what the selector was told last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.core.selector import SelectorState
from services.core.types import StrategySpan
from services.rollout.choices import FORCED, ChoiceLog
from services.rollout.sglang.graphs import CapturedGraphs, GraphPool, offered
from services.speculation.round import Choice, RoundOutcome, RoundView, StageSeconds
from services.speculation.selector import Selector, restore_selector, selector_state
from services.speculation.strategy import DraftStrategy

SLOW = 4.0  # strategies and batch sizes that follow one another differ by less


@dataclass(frozen=True, slots=True)
class LaunchedRound:
    """A round under way; travels with SGLang's result of it."""

    choice: Choice
    view: RoundView
    launched_s: float


class Decider:
    """The one decision maker of an engine. `captured`: depths whose graphs are there."""

    def __init__(
        self,
        selector: Selector,
        strategies: Mapping[int, DraftStrategy],
        pool: GraphPool,
        captured: Mapping[int, CapturedGraphs],
    ) -> None:
        self._selector, self._strategies, self._pool, self._captured = selector, strategies, pool, captured
        self._forced: int | None = None
        self._read_s = 0.0  # when results were last read
        self._held_s = float("-inf")  # when SGLang was last told to pause
        self._run = set[tuple[int, int]]()  # depths with so many requests that have run
        self._told_s: float | None = None  # what the last round took of which the selector was told
        self._log = ChoiceLog()

    def force(self, depth: int | None) -> None:
        """Use one depth from the next round on, whatever the batch; None gives the choice back to the selector."""
        assert depth is None or depth in self._strategies
        self._forced = depth

    def launch(self, view: RoundView, now_s: float) -> LaunchedRound:
        """Choose for a round that is launched now."""
        depths = offered(self._pool, self._captured, view.running)
        view = replace(view, offered=tuple(self._strategies[d] for d in depths))
        if self._forced is not None:
            choice = Choice(self._strategies[self._forced], FORCED)
        else:
            choice = self._possible(self._selector.choose(view), depths)
        return LaunchedRound(choice, view, now_s)

    def _possible(self, choice: Choice, depths: Sequence[int]) -> Choice:
        """For a selector that takes no notice of what is offered, the next shallower strategy that is."""
        depth = max(d for d in depths if d <= choice.strategy.depth)
        if depth == choice.strategy.depth:
            return choice
        return Choice(self._strategies[depth], f"no graphs of {choice.strategy.name} for so many requests")

    def read(self, now_s: float) -> None:
        """Results of a batch that was no round have been read: what comes next began then."""
        self._read_s = now_s

    def hold(self, now_s: float) -> None:
        """SGLang pauses: the time of a round under way will say nothing about its strategy."""
        self._held_s = now_s

    def finish(self, launched: LaunchedRound, accepted: Sequence[int], tokens: int, now_s: float) -> None:
        """A round's results were read at `now_s`: accepted drafts of each request that still lived, and the tokens that
        all of them kept."""
        began_s, self._read_s = max(self._read_s, launched.launched_s), now_s
        if launched.launched_s <= self._held_s or not accepted:
            return
        self._log.note(launched.choice, launched.view.running, tokens, began_s, now_s)
        depth, took_s = launched.choice.strategy.depth, now_s - began_s
        if self._warms_up((depth, launched.view.running), took_s):
            return
        self._told_s = took_s
        tried = tuple(sum(a >= k for a in accepted) for k in range(depth))
        kept = tuple(sum(a > k for a in accepted) for k in range(depth))
        seconds = StageSeconds(0.0, 0.0, 0.0, rest=took_s)
        cut = max(0, len(accepted) + sum(accepted) - tokens)
        outcome = RoundOutcome(launched.choice.strategy, launched.view, tokens, seconds, tried, kept, cut)
        self._selector.record(outcome)

    def _warms_up(self, kind: tuple[int, int], seconds: float) -> bool:
        first = kind not in self._run
        self._run.add(kind)
        return first and (self._told_s is None or seconds > SLOW * self._told_s)

    def selector_state(self, place: str) -> SelectorState | None:
        return selector_state(self._selector, place)

    def restore_selector(self, state: SelectorState, place: str) -> bool:
        return restore_selector(self._selector, state, place)

    def take_spans(self) -> tuple[StrategySpan, ...]:
        """Those since the last call, on this machine's monotonic clock."""
        return self._log.take()
