"""A drafter without weights: continue the way an earlier response to the same prompt went on.

Per prompt, every context of `min_match`..`max_match` tokens remembers how often each token followed it: in the prompt,
in sibling responses of the group (while they still run) and in earlier epochs. Proposals follow the longest context
known, most frequent continuation first (after SuffixDecoding, Oliaro et al. 2025; ours counts n-grams in hash maps
instead of a suffix tree: bounded match length, constant time per token, exact eviction). Each comes with the confidence
that it is right, so that a draft can end where going on would not pay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

# Doubt in a context of n tokens: as if a token never seen had followed it 4 / n times. From rollouts of the pocket
# model at temperature 1, the target's mean probability of the follower against `confidence`: a context of 2 seen once
# 0.34 and 0.33, of 3 0.42 and 0.43, of 4 0.59 and 0.50, of 8 0.73 and 0.67, two or three times 0.87 and 0.83.
_DOUBT = 4.0

# How often each token followed a context. Plain dictionaries: every generated token is counted in seven of them, and a
# Counter takes twice as long.
_Contexts = dict[tuple[int, ...], dict[int, int]]


class Follower(NamedTuple):
    """A proposed token; `confidence` that it is accepted if all before it are."""

    token: int
    confidence: float


def confidence(match: int, count: int, total: int) -> float:
    """That the follower seen `count` of `total` times behind a context of `match` tokens is the next token."""
    return count / (total + _DOUBT / match)


class SuffixIndex:
    """At most `max_tokens` indexed tokens, noted ones among them; the prompt least recently used goes first."""

    def __init__(self, max_tokens: int, min_match: int = 2, max_match: int = 8) -> None:
        assert 1 <= min_match <= max_match
        self._max_tokens, self._min, self.max_match = max_tokens, min_match, max_match
        self._maps: OrderedDict[str, _Contexts] = OrderedDict()
        self._noted: dict[str, list[tuple[Sequence[int], int]]] = {}  # not counted yet
        self._sizes: Counter[str] = Counter()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def observe(self, key: str, tokens: Sequence[int], start: int) -> None:
        """Index tokens[start:] of a sequence under its prompt's key, with the context before each."""
        self._enter(key, len(tokens) - start)
        self._count(key, tokens, start)

    def note(self, key: str, tokens: Sequence[int], start: int) -> None:
        """The same, counted when the prompt is asked about next: most of what is generated without drafts from here
        nobody ever asks about. `tokens` must not change any more."""
        self._enter(key, len(tokens) - start)
        if key in self._maps:
            self._noted.setdefault(key, []).append((tokens, start))

    def catch_up(self, key: str) -> bool:
        """Count what was noted of a prompt; whether there was anything."""
        noted = self._noted.pop(key, ())
        for tokens, start in noted:
            self._count(key, tokens, start)
        return bool(noted)

    def _count(self, key: str, tokens: Sequence[int], start: int) -> None:
        contexts = self._maps.get(key)
        if contexts is None:  # more than the index holds
            return
        for i in range(max(start, self._min), len(tokens)):
            token, before = tokens[i], tuple(tokens[max(0, i - self.max_match) : i])
            for n in range(self._min, len(before) + 1):
                seen = contexts.setdefault(before[-n:], {})
                seen[token] = seen.get(token, 0) + 1

    def _enter(self, key: str, new: int) -> None:
        self._maps.setdefault(key, {})
        self._maps.move_to_end(key)
        self._sizes[key] += new
        self._num_tokens += new
        while self._num_tokens > self._max_tokens:  # a single prompt over the bound starts anew
            self.forget(next(iter(self._maps)))

    def forget(self, key: str) -> None:
        """Drop what was indexed under a prompt's key, if anything was."""
        self._noted.pop(key, None)
        if self._maps.pop(key, None) is not None:
            self._num_tokens -= self._sizes.pop(key)

    def propose(
        self, key: str, tokens: Sequence[int], most: int, least: float = 0.0, reach: float = 1.0
    ) -> list[Follower]:
        """Up to `most` tokens that may follow; empty when no context is known. Ends before the token that is accepted
        with a probability below `least`, when `reach` is that of getting to the first."""
        self.catch_up(key)
        contexts = self._maps.get(key)
        if not contexts:
            return []
        tail, proposed = list(tokens[-self.max_match :]), list[Follower]()
        while len(proposed) < most:
            follower = self._follower(contexts, tail)
            if follower is None or (reach := reach * follower.confidence) < least:
                break
            proposed.append(follower)
            tail = [*tail[1 - self.max_match :], follower.token] if self.max_match > 1 else [follower.token]
        return proposed

    def _follower(self, contexts: _Contexts, tail: list[int]) -> Follower | None:
        for n in range(min(self.max_match, len(tail)), self._min - 1, -1):
            seen = contexts.get(tuple(tail[-n:]))
            if seen:
                best = max(seen, key=seen.__getitem__)
                return Follower(best, confidence(n, seen[best], sum(seen.values())))
        return None
