"""SGLang's adaptive rule as a selector (0.5.17, `speculative_adaptive`): the depth of an EAGLE chain follows a moving
mean of accepted drafts, with candidate depths and a mean of its own per range of batch sizes.

After `warmup_rounds`, every `update_interval` rounds of a slot: down while the mean is at most (next lower depth - 0.5
+ down_hysteresis), to depth 0 at 0.5 + down_hysteresis; otherwise up while it is above (depth - 0.5 + up_hysteresis).
A slot at depth 0 goes up to its smallest positive depth at the next update, since nothing is accepted there to judge
by. It knows nothing of time. Left out: `ceiling_coeff`, which is 0 by default, and rounding up to captured batch sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.config.speculation import DepthSlot, EmaSelector
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.strategy import DraftStrategy, draft_strategy


class _Slot:
    def __init__(self, config: DepthSlot, depths: Sequence[int], rule: EmaSelector) -> None:
        self._config, self._depths, self._rule = config, depths, rule
        self._at = len(depths) // 2
        self._mean = float(self.depth - 1)  # neutral: neither up nor down
        self._rounds = 0

    @property
    def depth(self) -> int:
        return self._depths[self._at]

    def update(self, accepted_drafts: float) -> None:
        """`accepted_drafts`: mean over the requests of the round."""
        rule = self._rule
        if self.depth > 0:
            self._mean += rule.alpha * (accepted_drafts - self._mean)
        self._rounds += 1
        since = self._rounds - rule.warmup_rounds
        if since > 0 and since % rule.update_interval == 0:
            self._move()

    def state(self) -> list[float]:
        return [self.depth, self._mean, self._rounds]

    def restore(self, state: Sequence[float]) -> None:
        """A depth that is not configured any more leaves the slot where it is."""
        depth, mean, rounds = state
        if depth in self._depths:
            self._at, self._mean, self._rounds = self._depths.index(int(depth)), mean, int(rounds)

    def _move(self) -> None:
        if self.depth == 0:
            self._at = min(1, len(self._depths) - 1)
            if self.depth and self._mean < 0:
                self._mean = float(self.depth - 1)
            return
        before = self._at
        while self._at and self._mean <= self._floor(self._depths[self._at - 1]):
            self._at -= 1
        if self._at < before:
            return
        while self._at + 1 < len(self._depths) and self._mean > self.depth - 0.5 + self._config.up_hysteresis:
            self._at += 1

    def _floor(self, lower: int) -> float:
        return (lower - 0.5 if lower else 0.5) + self._config.down_hysteresis


class Ema:
    def __init__(self, config: EmaSelector) -> None:
        self._starts = [s.min_running for s in config.slots]
        self._slots = [_Slot(s, sorted(set(s.depths)), config) for s in config.slots]
        strategies = [draft_strategy(s) for s in config.strategies]
        self._chains: dict[int, DraftStrategy] = {s.depth: s for s in strategies}

    def choose(self, view: RoundView) -> Choice:
        return Choice(self._chains[self._slot(view.running).depth], "as deep as drafts were accepted")

    def record(self, outcome: RoundOutcome) -> None:
        slot = self._slot(outcome.view.running)
        if outcome.strategy == self._chains[slot.depth]:  # not a forced one
            slot.update(sum(outcome.accepted) / outcome.view.running)

    def state(self) -> dict[str, Any]:
        slots = [[start, slot.state()] for start, slot in zip(self._starts, self._slots, strict=True)]
        return {"kind": "ema", "slots": slots}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state["kind"] == "ema"
        known = dict(state["slots"])
        for start, slot in zip(self._starts, self._slots, strict=True):
            if start in known:
                slot.restore(known[start])

    def _slot(self, running: int) -> _Slot:
        return self._slots[max(i for i, start in enumerate(self._starts) if start <= running)]
