"""The strategy with the most tokens per second expected, of all requests together; OFF is one of them.

    score = running * expected tokens per request / expected seconds

Tokens come from the AcceptanceModel, seconds from the CostModel; both are corrected by every round. What they may still
have wrong is looked for by *checks*: rounds with a strategy whose score could plausibly beat the best one's, given the
spreads of both models. A hopeless strategy is never checked. What checks are expected to lose is kept within
`check_share` of the time. Choosing is free of chance: the same rounds lead to the same choices.

An EAGLE strategy behind OFF must first catch up with the tokens that its drafter has not seen. That price is spread
over what the requests are expected to live (`Lifetime`), so ON is not avoided because of its first round, nor entered
for requests that are about to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.config.speculation import AdaptiveSelector
from services.speculation.cost import CostModel, batch_bucket
from services.speculation.cost_table import NETWORK, CostPoint
from services.speculation.expectation import AcceptanceModel
from services.speculation.lifetime import Ends, Lifetime
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

# Of a state; the number changes with what that holds, here and in its models: of another form, nothing is taken up.
KIND = "adaptive 2"
STANDS_FOR = 8  # rounds that a choice stands for within a batch bucket: deciding costs time, too
CHECK_GAP = 6  # rounds between two checks
# Rounds after which OFF is run again at about this batch size, if a check can be paid for: everything that is told of
# gains is measured by it, and a figure that nothing corrects drifts with the common factor. At once where it never was:
# its price at other batch sizes, or of a calibration beside other work, may be far off, and nothing else tells.
REFERENCE_GAP = 256
_CREDIT, _MOST_CREDIT = 4.0, 8.0  # rounds whose time is there for checks at first and with a new drafter; at most
_NEWS = 0.005  # of the rounds since the last new drafter, at most so many: a run that trains has one every step
_NEAR = 2  # half octaves: OFF at half or twice the batch size says enough of what it takes at this one
_WASTED = 0.5  # of catching up for a check: if the strategy pays, it had to be done anyway
_PLAIN = ("round", "drafter_version", "chosen_at", "checked_at", "credit_s", "news", "news_at")  # attributes of a state
_PATIENCE = 0.2  # how fast they grow; with 0 a single request now and then ran 8 to 10 % below the oracle
_SECONDS_BESIDE = 1.0  # standard deviations of a round's time beside its mean that count as plausible


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a strategy promises: `tokens` per request and round, `seconds` per round with its share of catching up,
    `score` in tokens per second of all requests."""

    strategy: DraftStrategy
    tokens: float
    seconds: float
    score: float


@dataclass(frozen=True, slots=True)
class _Paid:
    """For a check: the seconds that it was expected to lose against the best strategy, whose `score` that had."""

    strategy: DraftStrategy
    seconds: float
    score: float


class Adaptive:
    def __init__(
        self,
        strategies: Sequence[DraftStrategy],
        costs: CostModel,
        acceptance: AcceptanceModel,
        check_share: float = 0.01,
        margin: float = 0.015,
    ) -> None:
        self._strategies = tuple(dict.fromkeys((OFF, *strategies)))
        self._without_network = tuple(s for s in self._strategies if s.drafter not in NETWORK)
        self.costs, self.acceptance = costs, acceptance
        self._check_share, self._margin = check_share, margin
        self._life, self._ends = Lifetime(), Ends()
        self._round = 0
        self._drafter_version: int | None = None
        self._choice: Choice | None = None  # that stands
        self._held: DraftStrategy | None = None  # the best so far, checks aside
        self._chosen_for, self._chosen_at = (0, 0), 0
        self._checked_at = -CHECK_GAP
        self._check_paid: _Paid | None = None  # for the check under way
        self._credit_s, self._news, self._news_at = 0.0, True, 0
        self._used: dict[str, int] = {}
        self._references: dict[int, int] = {}  # by batch bucket: the last round with OFF
        self.measured = False  # whether its costs are an engine's own

    @property
    def compared(self) -> bool:
        """Whether it has run rounds with drafts and without."""
        return OFF.name in self._used and len(self._used) > 1

    @classmethod
    def configured(cls, config: AdaptiveSelector) -> Adaptive:
        strategies = [draft_strategy(s) for s in config.strategies]
        return cls(strategies, CostModel(), AcceptanceModel(), config.check_share, config.margin)

    def calibrate(self, points: Sequence[CostPoint]) -> None:
        """Start from the engine's own measured rounds."""
        self.costs, self.measured = CostModel.fit(points), True

    def state(self) -> dict[str, Any]:
        """All that it knows and where its checks are, as plain values."""
        choice = self._choice
        stands = None if choice is None else [choice.strategy.name, choice.reason, choice.expected, choice.expected_off]
        return {
            "kind": KIND,
            "costs": self.costs.state(),
            "acceptance": self.acceptance.state(),
            "life": self._life.state(),
            "ends": self._ends.state(),
            "choice": stands,
            "held": None if self._held is None else self._held.name,
            "chosen_for": list(self._chosen_for),
            "used": dict(self._used),
            "references": [list(seen) for seen in self._references.items()],
            **{name: getattr(self, f"_{name}") for name in _PLAIN},
            "measured": self.measured,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there. A strategy that is not configured any more is forgotten."""
        assert state["kind"] == KIND
        named = {s.name: s for s in self._strategies}
        self.costs, self.acceptance = CostModel.of(state["costs"]), AcceptanceModel.of(state["acceptance"])
        self._life, self._ends = Lifetime.of(state["life"]), Ends.of(state["ends"])
        self._held = named.get(state["held"])
        name, *rest = state["choice"] or [None]
        self._choice = Choice(named[name], *rest) if name in named else None
        running, version = state["chosen_for"]
        self._chosen_for, self._used = (running, version), dict(state["used"])
        self._references = dict(state["references"])
        for plain in _PLAIN:
            setattr(self, f"_{plain}", state[plain])
        self.measured = state["measured"]

    def choose(self, view: RoundView) -> Choice:
        self._round += 1
        self._note_drafter(view)
        now = batch_bucket(view.running), view.drafter_version
        if self._choice is None or now != self._chosen_for or self._round - self._chosen_at >= STANDS_FOR:
            self._choice = self._decide(view)
            self._chosen_for, self._chosen_at = now, self._round
            if self._choice.strategy != self._held:
                self._chosen_at -= STANDS_FOR  # a check is one round
        return self._choice

    def record(self, outcome: RoundOutcome) -> None:
        self.costs.observe(outcome)
        self.acceptance.observe(outcome)
        self._life.observe(outcome)
        self._ends.observe(outcome)
        self._used[outcome.strategy.name] = self._round
        if outcome.strategy.is_off:
            self._references[batch_bucket(outcome.view.running)] = self._round
        took = outcome.seconds.total
        self._settle_check(outcome)
        if self._news:
            rounds = min(_CREDIT, _NEWS * (self._round - self._news_at)) if self._news_at else _CREDIT
            self._credit_s, self._news, self._news_at = self._credit_s + rounds * took, False, self._round
        # Nor is more owed than that: one round that something else held up would end all checks for minutes.
        owed_most = -_MOST_CREDIT * took
        self._credit_s = min(max(self._credit_s, owed_most) + self._check_share * took, _MOST_CREDIT * took)

    def outlooks(self, view: RoundView) -> list[Outlook]:
        """What each offered strategy promises, OFF first. Without a drafter, those that need none."""
        able = self._strategies if view.drafter_version >= 0 else self._without_network
        return [self._outlook(s, view) for s in able if view.offers(s)]

    def _decide(self, view: RoundView) -> Choice:
        outlooks = self.outlooks(view)
        best = max(outlooks, key=lambda o: o.score)
        held = next((o for o in outlooks if o.strategy == self._held), None)
        reason = "most tokens per second expected"
        if held is not None and held is not best and best.score <= held.score * (1 + self._margin):
            best, reason = held, "kept: no other gains enough"
        self._held = best.strategy
        if self._check_paid is not None and self._check_paid.strategy == best.strategy:
            self._check_paid = None  # nobody told of that check
        check = self._check(outlooks, best, view)
        if check is not None:
            return Choice(check.strategy, "checks whether it pays", check.score, outlooks[0].score)
        if best.strategy.is_off and reason.startswith("most"):
            reason = "drafts cost more than they bring"
        return Choice(best.strategy, reason, best.score, outlooks[0].score)

    def _outlook(self, strategy: DraftStrategy, view: RoundView) -> Outlook:
        tokens, stages = self.acceptance.tokens(strategy, view, self._ends.rate), self.costs.seconds(strategy, view)
        catching_up = self._catching_up(strategy, view, tokens)
        # the first round pays all of it, for as many rounds as its requests live
        seconds = stages.total - catching_up * (1 - 1 / max(1.0, self._life.tokens / tokens))
        return Outlook(strategy, tokens, seconds, view.running * tokens / max(seconds, 1e-9))

    def _catching_up(self, strategy: DraftStrategy, view: RoundView, tokens: float) -> float:
        """Seconds of extending beyond those with the drafter one round behind, as it is while in use."""
        beyond = view.behind_tokens - view.running * tokens
        if beyond <= 0 or strategy.drafter not in NETWORK:
            return 0.0
        return self.costs.catching_up(strategy, view.running, beyond)

    def _check(self, outlooks: Sequence[Outlook], best: Outlook, view: RoundView) -> Outlook | None:
        """Of the strategies that might be better, the one that was not seen for longest, if it can be paid for."""
        if self._round - self._checked_at < CHECK_GAP or not self._credit_s > 0:
            return None
        losses = {
            o.strategy.name: loss
            for o in outlooks
            if o is not best
            and (loss := self._loss(o, best, view)) <= self._credit_s
            and (self._may_beat(o, best, view) or self._old_reference(o, view))
        }
        candidates = [o for o in outlooks if o.strategy.name in losses]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda o: (self._used.get(o.strategy.name, -1), -o.score))
        self._check_paid = _Paid(chosen.strategy, max(0.0, losses[chosen.strategy.name]), best.score)
        self._credit_s -= self._check_paid.seconds
        self._checked_at = self._round
        return chosen

    def _settle_check(self, outcome: RoundOutcome) -> None:
        """What a check did lose is what it costs: with a new drafter, of which the best is hoped, that is more than was
        expected of it as a rule. An engine that launches a round before it has read the last one tells of others
        first, and of a round that warmed up it never tells."""
        paid = self._check_paid
        if paid is not None and paid.strategy == outcome.strategy:
            self._credit_s += paid.seconds - max(0.0, outcome.seconds.total - outcome.tokens / paid.score)
            self._check_paid = None

    def _old_reference(self, other: Outlook, view: RoundView) -> bool:
        bucket = batch_bucket(view.running)
        known = [at for near, at in self._references.items() if abs(near - bucket) <= _NEAR]
        return other.strategy.is_off and (not known or self._round - max(known) >= REFERENCE_GAP)

    def _loss(self, other: Outlook, best: Outlook, view: RoundView) -> float:
        """Seconds that a round with `other` is expected to lose against the best one."""
        wanted = (1 - _WASTED) * self._catching_up(other.strategy, view, other.tokens)
        return self.costs.seconds(other.strategy, view).total - wanted - view.running * other.tokens / best.score

    def _may_beat(self, other: Outlook, best: Outlook, view: RoundView) -> bool:
        """Whether `other` is better if its tokens and seconds lie as far beside as is plausible. Where the best one is
        accepted by the same law, its own tokens move along, up or down."""
        model, shared = self.acceptance, self.acceptance.shares(other.strategy, best.strategy)
        beside, ends = self._tokens_beside(other.strategy, view.running), self._ends.rate

        def lift(deviations: float) -> float:
            gain = model.tokens_at(other.strategy, view, deviations, ends) / other.tokens
            return gain / (model.tokens_at(best.strategy, view, deviations, ends) / best.tokens) if shared else gain

        most = max(lift(beside), lift(-beside)) if shared else lift(beside)
        cheaper = math.exp(_SECONDS_BESIDE * self.costs.spread(other.strategy, view))
        return other.score * most * cheaper > best.score * (1 + self._margin)

    def _tokens_beside(self, strategy: DraftStrategy, running: int) -> float:
        """Standard deviations that count as plausible: the longer a strategy was not run, the more, and the more the
        fewer requests a round tells of. A single one that refused the first drafts must not rule it out for good."""
        gap = self._round - self._used.get(strategy.name, 0)
        return math.sqrt(1 + _PATIENCE / running * math.log(1 + gap / CHECK_GAP))

    def _note_drafter(self, view: RoundView) -> None:
        if view.drafter_version != self._drafter_version and self._drafter_version is not None:
            self.acceptance.drafter_changed()
            self._news = True
        self._drafter_version = view.drafter_version
