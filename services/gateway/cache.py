"""Answers that many readers share: each is made once per moment, in a thread, and handed to everyone as bytes.

So a thousand open pages cost one look at the run folder a second, and never touch the run itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Body:
    """`etag` names the content: equal bytes, equal tag."""

    content: bytes
    etag: str


def body_of(content: bytes) -> Body:
    return Body(content, f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"')


class Shared(Generic[T]):
    """The last value per key, remade when it is older than `fresh_s`. One remake per key at a time: the others wait
    for it. What the maker raises, all who wait get."""

    def __init__(self, fresh_s: float, keep: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s, self._keep, self._clock = fresh_s, keep, clock
        self._values: OrderedDict[Hashable, tuple[float, T]] = OrderedDict()
        self._making: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, key: Hashable, make: Callable[[], T]) -> T:
        known = self._values.get(key)
        if known is not None and self._clock() - known[0] < self._fresh_s:
            self._values.move_to_end(key)
            return known[1]
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(self._make(key, make))
        return await asyncio.shield(task)  # a reader that goes away takes nothing from the others

    async def _make(self, key: Hashable, make: Callable[[], T]) -> T:
        try:
            began = self._clock()
            value = await asyncio.to_thread(make)
            self._values[key] = (began, value)
            self._values.move_to_end(key)
            while len(self._values) > self._keep:
                self._values.popitem(last=False)
            return value
        finally:
            del self._making[key]
