"""How many tokens the next round will commit, from what drafts were accepted before.

Strategies share what they learn: the chains of a drafter differ in depth only, so they have one track of conditional
acceptance by position. A tree starts from the chain's rates through a model of sibling ranks and has a track of its
own on top; its rounds also tell about the chain. Sampled and argmax drafts are accepted by different laws and are kept
apart, as are temperatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from services.speculation.acceptance_track import PRIOR_WEIGHT, Track
from services.speculation.budget import expected_accepted
from services.speculation.cost_table import LOOK_UP, NETWORK
from services.speculation.round import RoundOutcome, RoundView
from services.speculation.strategy import DraftStrategy
from services.speculation.tree import TreeShape

RANK_DECAY = 0.4  # acceptance of a sibling, given that those before it were refused, relative to theirs
TREE_WEIGHT = 20.0  # tries that the ranks' model is worth against a tree's own
HYBRID_WEIGHT = 8.0  # and an EAGLE chain's rates against a hybrid's own
HEARSAY = 0.5  # what a tree's try is worth to the chain

_BOTH = NETWORK & LOOK_UP
Key = tuple[str, bool, float, str]


@dataclass(frozen=True)
class TreeRates:
    """By depth k, given the chain's rates: `advance`: of a request at depth k, that some child is accepted; `first`: of
    those, that it was the first child; `offered`: that its node has children."""

    advance: tuple[float, ...]
    first: tuple[float, ...]
    offered: tuple[float, ...]


@lru_cache(maxsize=4096)
def tree_rates(shape: TreeShape, chain: tuple[float, ...], rank_decay: float = RANK_DECAY) -> TreeRates:
    """The child of rank r at position k is accepted with chain[k] * rank_decay^r once those before it were refused."""
    reach, first = [0.0] * shape.num_nodes, [0.0] * shape.depth
    at, inner = [0.0] * (shape.depth + 1), [0.0] * shape.depth
    reach[0] = 1.0
    for node, children in enumerate(shape.children):  # parents come before children
        depth, left = shape.depths[node], reach[node]
        at[depth] += reach[node]
        if children:
            inner[depth] += reach[node]
            first[depth] += reach[node] * chain[depth]
        for rank, child in enumerate(children):
            reach[child] = left * chain[depth] * rank_decay**rank
            left -= reach[child]
    return TreeRates(
        tuple(at[k + 1] / at[k] if at[k] else 0.0 for k in range(shape.depth)),
        tuple(first[k] / at[k + 1] if at[k + 1] else 0.0 for k in range(shape.depth)),
        tuple(inner[k] / at[k] if at[k] else 0.0 for k in range(shape.depth)),
    )


def committed(rates: list[float]) -> float:
    """1 + the expected length of the accepted run: the acceptance_length that these conditional rates make."""
    return 1.0 + expected_accepted(rates)


class AcceptanceModel:
    def __init__(self) -> None:
        self._tracks: dict[Key, Track] = {}
        self._round = 0

    def tokens(self, strategy: DraftStrategy, view: RoundView, ends: float = 0.0) -> float:
        """Expected tokens that a request commits in a round, the bonus included. `ends`: the chance of each token to be
        the last one, behind which a stop cuts off what was accepted; 0: that is counted as well."""
        return self.tokens_at(strategy, view, 0.0, ends)

    def tokens_at(self, strategy: DraftStrategy, view: RoundView, deviations: float, ends: float = 0.0) -> float:
        """The same if all its rates lie `deviations` standard deviations beside their means. Together: what moves a
        drafter's acceptance at one position moves it at all of them."""
        if strategy.is_off:
            return 1.0
        means, spreads = self._rates(strategy, view.temperature)
        beside = [min(0.999, max(0.0, m + deviations * s)) for m, s in zip(means, spreads, strict=True)]
        return committed([(1 - ends) * rate for rate in beside])

    def shares(self, one: DraftStrategy, other: DraftStrategy) -> bool:
        """Whether the two are accepted by the same law, so that the uncertainty of one is that of the other."""
        return _kind(one) == _kind(other)

    def observe(self, outcome: RoundOutcome) -> None:
        self._round += 1
        strategy, temperature = outcome.strategy, outcome.view.temperature
        if strategy.is_off:
            return
        padding = (0,) * (_depth(strategy) - len(outcome.accepted))
        accepted = (*outcome.accepted, *padding)
        opportunities = (outcome.view.running, *accepted[:-1])
        if strategy.drafter == "eagle" and strategy.topk > 1:
            self._tell_chain(outcome)
        self._track(_key(strategy, temperature)).observe(accepted, opportunities, self._round)

    def drafter_changed(self) -> None:
        """Another drafter version is served: what was learned becomes a guess."""
        for (drafter, *_), track in self._tracks.items():
            if drafter in NETWORK:
                track.doubt()

    def state(self) -> dict[str, Any]:
        """All that it knows, as plain values."""
        tracks = [[*key, track.state()] for key, track in self._tracks.items()]
        return {"round": self._round, "tracks": tracks}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> AcceptanceModel:
        model = cls()
        model._round = state["round"]
        for *key, track in state["tracks"]:
            drafter, sampled, temperature, kind = key
            model._tracks[drafter, sampled, temperature, kind] = Track.of(track)
        return model

    def _tell_chain(self, outcome: RoundOutcome) -> None:
        """A tree's accepted drafts, by the share of them that a chain would have had too."""
        strategy, count = outcome.strategy, len(outcome.accepted)
        if not count:
            return
        ranks = self._ranks(strategy, outcome.view.temperature)
        accepted = [HEARSAY * a * f for a, f in zip(outcome.accepted, ranks.first, strict=False)]
        tries = [HEARSAY * t for t in outcome.tried]
        self._track(_chain_key(strategy, outcome.view.temperature)).observe(accepted, tries, self._round)

    def _rates(self, strategy: DraftStrategy, temperature: float) -> tuple[list[float], list[float]]:
        track = self._track(_key(strategy, temperature))
        if strategy.drafter == "eagle" and strategy.topk > 1:
            return track.rates(
                self._round, self._ranks(strategy, temperature).advance, self._trust(strategy, temperature, TREE_WEIGHT)
            )
        depth = _depth(strategy)
        if strategy.drafter in _BOTH:
            prior, _ = self._track(_chain_key(strategy, temperature)).own_rates(self._round, depth)
            return track.rates(self._round, prior, self._trust(strategy, temperature, HYBRID_WEIGHT))
        return track.own_rates(self._round, depth)

    def _trust(self, strategy: DraftStrategy, temperature: float, most: float) -> float:
        """Tries that the chain's rates are worth as a prior: no more than the chain has seen."""
        return min(most, PRIOR_WEIGHT + self._track(_chain_key(strategy, temperature)).tries)

    def _ranks(self, strategy: DraftStrategy, temperature: float) -> TreeRates:
        chain, _ = self._track(_chain_key(strategy, temperature)).own_rates(self._round, strategy.depth)
        # rounded, so that the shape is walked again only when the rates moved
        return tree_rates(strategy.shape, tuple(round(r, 3) for r in chain))

    def _track(self, key: Key) -> Track:
        """Made when first asked for. At a temperature that is new, the nearest one's rates are a guess."""
        if key not in self._tracks:
            known = [k for k in self._tracks if (k[0], k[1], k[3]) == (key[0], key[1], key[3])]
            nearest = min(known, key=lambda k: abs(k[2] - key[2]), default=None)
            self._tracks[key] = Track() if nearest is None else self._tracks[nearest].doubtful_copy()
        return self._tracks[key]


def _key(strategy: DraftStrategy, temperature: float) -> Key:
    return (strategy.drafter, strategy.sampled, _temperature(temperature), _kind(strategy)[2])


def _chain_key(strategy: DraftStrategy, temperature: float) -> Key:
    return ("eagle", strategy.sampled, _temperature(temperature), "chain")


def _kind(strategy: DraftStrategy) -> tuple[str, bool, str]:
    return (strategy.drafter, strategy.sampled, "chain" if strategy.topk == 1 else strategy.name)


def _depth(strategy: DraftStrategy) -> int:
    """Positions that may hold a draft; a look-up that lengthens a learned draft goes beyond the network's passes."""
    return max(strategy.depth, strategy.num_draft_tokens - 1) if strategy.drafter in _BOTH else strategy.depth


def _temperature(value: float) -> float:
    """0 for greedy requests; else to a quarter, since the mean over a mixed batch moves as requests end."""
    return 0.0 if value <= 0 else max(0.25, round(4 * value) / 4)
