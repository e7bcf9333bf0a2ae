"""What whoever serves people asks of whoever generates: token ids in, token ids out as they come.

Standard library only. The records cross process borders, so they hold plain values.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.acceptance import AcceptanceStats
from services.core.serving import ServerView
from services.core.types import FinishReason, SamplingParams, ServedVersions


@dataclass(frozen=True, slots=True)
class Generation:
    """One request of a client. Prompt p is answered `num_choices` times; choice p * num_choices + i is drawn with the
    seed of that index. `stream`: tokens are told as they come, else each choice at once when it has ended."""

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    sampling: SamplingParams
    stream: bool = False

    def __post_init__(self) -> None:
        assert self.prompts and self.seeds and len(self.seeds) % len(self.prompts) == 0

    @property
    def num_choices(self) -> int:
        return len(self.seeds) // len(self.prompts)


@dataclass(frozen=True, slots=True)
class Increment:
    """New tokens of one choice, one logprob each (natural log under the distribution that was sampled from). All
    increments of a choice name the same `versions`. The last one has a `finish_reason` and the choice's `acceptance`.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: ServedVersions
    finish_reason: FinishReason | None = None
    acceptance: AcceptanceStats | None = None

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), "one logprob per token"


class Generator(Protocol):
    def generate(self, asked: Generation) -> AsyncGenerator[Increment, None]:
        """Closing the generator early ends the work at once. Raises RequestError for what can never be served,
        OverloadedError when too much waits, and ServiceLostError when the answer was lost on its way; nothing is told
        twice."""

    async def served(self) -> ServedVersions:
        """The versions that a request that came now would get."""

    async def views(self) -> Sequence[ServerView]:
        """What every model server that answers tells about itself."""
