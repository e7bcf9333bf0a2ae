"""The reference's tuner as a selector: bucketed epsilon-greedy (TLT, arXiv 2511.16665, BEG-MAB).

Its formula: with accepted counts a_j of b requests in s seconds, A = mean(a_j) + 1; the reward is Ã * b / s, Ã being
the median of A over all batch sizes of that strategy, looked up anew with probability 0.1. Rewards are kept apart by
groups of batch sizes (1..31 singly, 32..120 by 8, 128.. by 32), in a window of 300; the best median wins, a strategy
without rewards comes first, and with probability epsilon any is drawn. Deviations: a bucket's strategies are listed
rather than derived from their number of draft tokens, and OFF may be one of them, at any size and back again.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from services.config.speculation import BucketSelector
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.strategy import DraftStrategy, draft_strategy

_REFRESH = 0.1


def batch_group(running: int) -> int:
    """The smallest batch size of the group."""
    if running < 32:
        return running
    return running // 8 * 8 if running < 128 else running // 32 * 32


class BucketedEpsilonGreedy:
    def __init__(self, config: BucketSelector, rng: random.Random) -> None:
        self._epsilon, self._rng = config.epsilon, rng
        self._starts = [b.min_running for b in config.buckets]
        self._arms = [[draft_strategy(s) for s in b.strategies] for b in config.buckets]
        self._rewards = defaultdict[tuple[str, int], deque[float]](lambda: deque(maxlen=config.window))
        self._lengths = defaultdict[str, deque[float]](lambda: deque(maxlen=config.window))
        self._median_length: dict[str, float] = {}

    def choose(self, view: RoundView) -> Choice:
        candidates, group = self._candidates(view.running), batch_group(view.running)
        arms = [s for s in candidates if view.offers(s)] or candidates
        if len(arms) == 1:
            return Choice(arms[0], "the only one at this batch size")
        untried = next((s for s in arms if not self._rewards[s.name, group]), None)
        if self._rng.random() < self._epsilon:
            return Choice(self._rng.choice(arms), "explored at random")
        if untried is not None:
            return Choice(untried, "not tried yet")
        return Choice(max(arms, key=lambda s: median(self._rewards[s.name, group])), "fastest so far")

    def record(self, outcome: RoundOutcome) -> None:
        arms, running, name = self._candidates(outcome.view.running), outcome.view.running, outcome.strategy.name
        if outcome.strategy not in arms:  # a forced strategy that is no candidate here
            return
        length = sum(outcome.accepted) / running + 1
        self._lengths[name].append(length)
        if len(arms) > 1:
            length = self._usual_length(name)
        reward = length * running / max(outcome.seconds.total, 1e-9)
        self._rewards[name, batch_group(running)].append(reward)

    def state(self) -> dict[str, Any]:
        """Its windows and its random numbers, as plain values."""
        version, internal, spare = self._rng.getstate()
        return {
            "kind": "bucketed",
            "rewards": [[*key, list(window)] for key, window in self._rewards.items()],
            "lengths": {name: list(window) for name, window in self._lengths.items()},
            "median_length": dict(self._median_length),
            "random": [version, list(internal), spare],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state["kind"] == "bucketed"
        for name, group, window in state["rewards"]:
            self._rewards[name, group].extend(window)
        for name, window in state["lengths"].items():
            self._lengths[name].extend(window)
        self._median_length = dict(state["median_length"])
        version, internal, spare = state["random"]
        self._rng.setstate((version, tuple(internal), spare))

    def _usual_length(self, name: str) -> float:
        if name not in self._median_length or self._rng.random() < _REFRESH:
            self._median_length[name] = median(self._lengths[name])
        return self._median_length[name]

    def _candidates(self, running: int) -> list[DraftStrategy]:
        return self._arms[max(i for i, start in enumerate(self._starts) if start <= running)]
