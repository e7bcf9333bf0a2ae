"""What the adapter keeps of a request, and of the prefills under way."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.types import PartialRollout
from services.rollout.request import RequestLife
from services.rollout.sglang.handle import Update


@dataclass
class Request(RequestLife):
    """`news` is of the part that SGLang generates; `earlier` is what another server generated before."""

    news: Update
    earlier: PartialRollout | None = None

    @property
    def earlier_ids(self) -> tuple[int, ...]:
        return self.earlier.response_ids if self.earlier else ()

    @property
    def response_ids(self) -> tuple[int, ...]:
        return (*self.earlier_ids, *self.news.response_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        # SGLang tells a greedy token's logprob at temperature 1; greedy means probability one
        told = self.news.logprobs if self.sampling.temperature else (0.0,) * len(self.news.response_ids)
        return (*self.earlier.rollout_logprobs, *told) if self.earlier else told


@dataclass
class Prefill:
    """SGLang does not tell how long its prefills take. It does them first: the time in which some request has no token
    yet, polls included, is an upper bound."""

    tokens: int = 0
    seconds: float = 0.0
    _open: int = 0
    _since_s: float = 0.0

    def begin(self, tokens: int, now_s: float) -> None:
        if not self._open:
            self._since_s = now_s
        self._open += tokens

    def end(self, now_s: float) -> None:
        if self._open:
            self.tokens, self.seconds = self.tokens + self._open, self.seconds + now_s - self._since_s
        self._open = 0

    def forget(self) -> None:
        self._open = 0
