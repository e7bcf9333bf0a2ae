"""One client's request on its way through the engine's thread."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.errors import LongtailError
from services.core.generation import Generation, Increment
from services.core.types import GroupWork, Prompt


@dataclass(eq=False)
class Ticket:
    """Admitted as a whole, so that all its choices have one version. `told[i]`: tokens of choice i that were told."""

    asked: Generation
    works: tuple[GroupWork, ...]
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[Increment | LongtailError] = field(default_factory=asyncio.Queue)
    told: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.asked.seeds)

    @property
    def rollout_ids(self) -> list[str]:
        return [f"{work.group_id}#{i}" for work in self.works for i in work.indices]

    def tell(self, news: Increment | LongtailError) -> None:
        """From the engine's thread. A client whose loop has ended is told nothing."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)


def works_of(asked: Generation, names: Iterator[int], keep_states: bool) -> tuple[GroupWork, ...]:
    """One group for each prompt, with the next of `names`."""
    n = asked.num_choices

    def work(p: int, ids: tuple[int, ...]) -> GroupWork:
        own = range(p * n, p * n + n)
        seeds = asked.seeds[own.start : own.stop]
        return GroupWork(f"request {next(names)}", _prompt(ids), tuple(own), seeds, asked.sampling, keep_states)

    return tuple(work(p, ids) for p, ids in enumerate(asked.prompts))


def _prompt(ids: tuple[int, ...]) -> Prompt:
    """Equal prompts share what the suffix index knows of their answers."""
    name = hashlib.blake2b(repr(ids).encode(), digest_size=12).hexdigest()
    return Prompt(name, "", ids, "", "serve")
