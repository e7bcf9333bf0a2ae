"""What a round's draft is made of: the EAGLE drafter, the suffix index, or for each request the better of the two."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from services.core.errors import WeightError
from services.models.sampling import SamplingTensors
from services.rollout.eagle import CATCH_UP_CHUNK, NEAR, CaughtUp, EagleDrafting
from services.rollout.request import Request
from services.rollout.rows import Rows
from services.rollout.stopwatch import Stopwatch
from services.speculation.budget import AcceptanceRate, expected_accepted, share_budget
from services.speculation.catching_up import catch_up_plan, expected_remaining
from services.speculation.drafting import Draft, appended, one_hot_chains
from services.speculation.strategy import DraftStrategy
from services.speculation.suffix_index import Follower, SuffixIndex
from services.speculation.tree import chain

# A suffix draft ends where its next token would be accepted with less than this probability.
LEAST_REACH = 0.2
# Drafter entries that a round may run for rows far behind, per running request and layer of the target: as many as a
# decode step has passes through a layer, four times (about half a step: those run many tokens at once).
PORTION = 4
MOST_BEHIND = 0.5  # share of the rows; with more of them far behind nobody drafts
# Of a drafter of which nothing is known yet: what it takes to be tried beside a suffix draft that is not certain.
FIRST_RATE = 0.6


class Proposer:
    """Drafts for all rows. What is decided for a row (which drafter, how long) follows from earlier rounds alone."""

    def __init__(self, rows: Rows, index: SuffixIndex | None, watch: Stopwatch) -> None:
        self.eagle = EagleDrafting(rows)
        self._rows, self._index, self._watch = rows, index, watch
        self._shared = AcceptanceRate()  # of the EAGLE drafter, over all requests
        self._finished: deque[int] = deque(maxlen=128)  # lengths of the last responses that ended
        self.portions = True  # False: whoever is behind catches up in one round
        self._drawn: Sequence[int] = ()  # tokens of each row of this round that the EAGLE drafter drew

    def propose(
        self,
        strategy: DraftStrategy,
        requests: Sequence[Request],
        sampling: SamplingTensors,
        uniforms: Callable[[int], Tensor],
    ) -> Draft:
        """`uniforms(n)` gives float64 [rows,n] fresh numbers. WeightError when an EAGLE strategy has no drafter."""
        if strategy.drafter == "eagle" and not self.eagle.ready:
            raise WeightError(f"strategy {strategy.name} needs a drafter: load one, or use strategy off")
        found: list[list[Follower]] = [[] for _ in requests]
        if strategy.searched:
            self._index_catches_up(requests)
            found = [self._follow(r, [], strategy.longest, 1.0) for r in requests]
        instead = [self._better(strategy, r, f) for r, f in zip(requests, found, strict=True)]
        self._drawn = [0] * len(requests)
        if strategy.drafter in ("eagle", "hybrid") and self.eagle.ready and not all(instead):
            return self._drawn_first(strategy, requests, found, instead, sampling, uniforms)
        return self._searched(found)

    def learn(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """What verification said of the last proposal: accepted tokens by row."""
        for request, drawn, count in zip(requests, self._drawn, accepted, strict=True):
            if drawn:
                right = min(drawn, count)
                tried = right + (right < drawn)
                request.learned.record(tried, right)
                self._shared.record(tried, right)

    def ended(self, num_tokens: int) -> None:
        """A response came to its end: how long others may last is judged by it."""
        self._finished.append(num_tokens)

    def index(self, requests: Sequence[Request]) -> None:
        """Behind a round that asked the suffix index: it sees what the round brought, since the next one asks as well.
        Other rounds do not pay for it."""
        index = self._index
        assert index is not None, "the service makes a suffix index when a strategy needs one"
        for request in requests:
            self._tell(index.observe, request)

    def note(self, request: Request) -> None:
        """Let the suffix index know what is new of a response that leaves, to be counted when somebody asks for it."""
        if self._index is not None:
            self._tell(self._index.note, request)

    def _tell(self, told: Callable[[str, Sequence[int], int], None], request: Request) -> None:
        new = len(request.response_ids) - request.indexed
        if new and self._index is not None:
            known = request.last_ids(self._index.max_match + new)
            told(request.work.prompt.id, known, len(known) - new)
            request.indexed += new

    def _index_catches_up(self, requests: Sequence[Request]) -> None:
        """With what rounds of other strategies brought, and responses that left."""
        assert self._index is not None
        behind = any(len(r.response_ids) > r.indexed for r in requests)
        self.index(requests)
        noted = [self._index.catch_up(key) for key in {r.work.prompt.id for r in requests}]
        if behind or any(noted):
            self._watch.lap("extend")

    def _caught_up(self, requests: Sequence[Request]) -> CaughtUp:
        """Bring the drafter forward by a round's portion. While most rows are far behind, none is ready: drafting and
        verification run over all rows, whoever drafts."""
        eagle, far = self.eagle, self.eagle.missing() > NEAR
        if far.any():
            eagle.feed(self._portion(requests) if self.portions else eagle.missing().tolist())
            far = eagle.missing() > NEAR
        if far.mean() > MOST_BEHIND:
            return CaughtUp(self._rows.hidden[: len(requests), 0], [False] * len(requests))
        return eagle.catch_up()

    def _portion(self, requests: Sequence[Request]) -> Sequence[int]:
        """Drafter entries of each row to run this round."""
        layers = self._rows.target.spec.num_layers
        lives = [(len(r.response_ids), r.sampling.max_tokens - len(r.response_ids)) for r in requests]
        remaining = [expected_remaining(generated, left, self._finished) for generated, left in lives]
        budget = max(CATCH_UP_CHUNK, PORTION * len(requests) * layers)
        missing = [n if n > NEAR else 0 for n in self.eagle.missing().tolist()]  # near rows have a pass together
        return catch_up_plan(missing, remaining, budget, layers)

    def _rate(self, request: Request) -> float:
        return request.learned.estimate(self._shared.estimate(FIRST_RATE))

    def _better(self, strategy: DraftStrategy, request: Request, found: Sequence[Follower]) -> bool:
        """Is the suffix draft expected to bring more than the EAGLE drafter's?"""
        drawn = expected_accepted([self._rate(request)] * strategy.depth)
        return expected_accepted([f.confidence for f in found]) >= drawn

    def _follow(self, request: Request, drawn: Sequence[int], most: int, reach: float) -> list[Follower]:
        """What the index says comes behind the request's tokens and those `drawn`."""
        index = self._index
        assert index is not None, "the service makes a suffix index when a strategy needs one"
        known = [*request.last_ids(index.max_match), *drawn]
        return index.propose(request.work.prompt.id, known, most, LEAST_REACH, reach)

    def _searched(self, found: Sequence[Sequence[Follower]]) -> Draft:
        return one_hot_chains([[f.token for f in row] for row in found], self._rows.kv.layers[0].device)

    def _drawn_first(
        self,
        strategy: DraftStrategy,
        requests: Sequence[Request],
        found: Sequence[Sequence[Follower]],
        instead: Sequence[bool],
        sampling: SamplingTensors,
        uniforms: Callable[[int], Tensor],
    ) -> Draft:
        caught = self._caught_up(requests)
        self._watch.lap("extend")
        drafts = [ready and not better for ready, better in zip(caught.ready, instead, strict=True)]
        lengths = self._lengths(strategy, requests, drafts)
        if not any(lengths):
            return self._searched(found)
        shape = strategy.shape if strategy.budget is None else chain(max(lengths))
        draft = self.eagle.propose(shape, strategy.sampled, caught.hidden, lengths, sampling, uniforms)
        self._drawn = lengths
        if strategy.drafter == "eagle":
            return draft
        tokens = draft.tokens.tolist()
        behind = [
            self._behind(strategy, request, tokens[r][: lengths[r]]) if drafts[r] else found[r]
            for r, request in enumerate(requests)
        ]
        return appended(draft, [[f.token for f in row] for row in behind])

    def _lengths(self, strategy: DraftStrategy, requests: Sequence[Request], drafts: Sequence[bool]) -> Sequence[int]:
        """How many tokens the EAGLE drafter draws for each row."""
        if strategy.budget is None:
            return [(strategy.shape.num_nodes - 1) * draft for draft in drafts]
        rates = [self._rate(r) if draft else 0.0 for r, draft in zip(requests, drafts, strict=True)]
        return share_budget(rates, strategy.budget * sum(drafts), strategy.depth)

    def _behind(self, strategy: DraftStrategy, request: Request, drawn: Sequence[int]) -> list[Follower]:
        return self._follow(request, drawn, strategy.longest - len(drawn), self._rate(request) ** len(drawn))
