"""Asks the generator and answers the client: whole, or as server-sent events.

A client that goes away takes its work with it, and so does one whose time is over: closing the generator ends what
runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from services.core.errors import LongtailError, ServiceLostError, WaitTimeoutError
from services.core.generation import Generation, Generator, Increment
from services.gateway.openai.answers import Usage, usage_of
from services.gateway.openai.choice import Choice, Ended, Head, Style, Token
from services.gateway.openai.errors import body_of
from services.gateway.openai.settings import fingerprint
from services.gateway.openai.text import TextCodec, TextStream

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")
MakeHead = Callable[[str], Head]  # of a system_fingerprint


class ClientGone(Exception):
    """Nobody is left to answer."""


async def unless_gone(request: Request, work: Awaitable[T], timeout_s: float) -> T:
    """Raises ClientGone, and WaitTimeoutError after `timeout_s`; the work is cancelled either way."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    both: set[asyncio.Future[Any]] = {working, leaving}
    try:
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise ClientGone
        raise _too_slow(timeout_s)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)  # what it holds is given back before we go on


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_slow(timeout_s: float) -> WaitTimeoutError:
    return WaitTimeoutError(f"the answer took longer than {timeout_s:g} s: ask for fewer tokens")


async def _next(news: AsyncGenerator[Increment, None], deadline_s: float) -> Increment | None:
    """None: there are no more. Raises WaitTimeoutError."""
    try:
        async with asyncio.timeout_at(deadline_s):
            return await anext(news, None)
    except TimeoutError:
        raise WaitTimeoutError("the answer took too long: ask for fewer tokens") from None


class Answering:
    """One answer. `make_head` is called with the fingerprint of the versions that make it."""

    def __init__(self, asked: Generation, codec: TextCodec, style: Style, make_head: MakeHead) -> None:
        self._asked, self._style, self._make_head = asked, style, make_head
        self._head: Head | None = None
        sampling = asked.sampling
        self._choices = [
            Choice(i, codec, TextStream(codec, sampling.stop_strings), sampling.stop_token_ids)
            for i in range(len(asked.seeds))
        ]

    async def whole(self, generator: Generator) -> BaseModel:
        texts: list[list[str]] = [[] for _ in self._choices]
        tokens: list[list[Token]] = [[] for _ in self._choices]
        async with aclosing(generator.generate(self._asked)) as news:
            async for increment in news:
                text, new = self._take(increment)
                texts[increment.index].append(text)
                tokens[increment.index].extend(new)
        ended = [self._ended(c, "".join(texts[c.index]), tokens[c.index]) for c in self._choices]
        return self._style.whole(self._known_head, ended, self._usage())

    async def events(
        self, first: Increment, news: AsyncGenerator[Increment, None], usage: bool, deadline_s: float
    ) -> AsyncIterator[bytes]:
        """`first` was waited for already, to know that there is an answer. `deadline_s`: on the loop's clock. An error
        is an event and the last one: there is no end mark then. Behind the end of every choice it is nobody's: the
        client has the whole answer, and what is lost is a server that had made it."""
        async with aclosing(news):
            increment: Increment | None = first
            while increment is not None:
                for part in self._parts(increment):
                    yield _event(part)
                try:
                    increment = await _next(news, deadline_s)
                    if increment is None:
                        self._check_whole()
                except LongtailError as error:
                    if not self._is_whole:
                        yield _error_event(error)
                        return
                    increment = None
        if usage:
            yield _event(self._style.usage(self._known_head, self._usage()))
        yield DONE

    def _parts(self, news: Increment) -> list[BaseModel]:
        choice, style = self._choices[news.index], self._style
        opens = not choice.begun
        text, tokens = self._take(news)
        head = self._known_head
        opening = style.opening(head, choice.index) if opens else None
        parts = [] if opening is None else [opening]
        if text or (tokens and style.logprobs):
            parts.append(style.more(head, choice.index, text, tokens))
        if choice.finish_reason is not None:
            parts.append(style.end(head, choice.index, choice.finish_reason))
        return parts

    def _take(self, news: Increment) -> tuple[str, list[Token]]:
        made_by = fingerprint(news.versions)
        if self._head is None:
            self._head = self._make_head(made_by)
        assert self._head.system_fingerprint == made_by, "an answer of two versions"
        return self._choices[news.index].take(news)

    @property
    def _known_head(self) -> Head:
        assert self._head is not None, "nothing was generated yet"
        return self._head

    @property
    def _is_whole(self) -> bool:
        return all(c.finish_reason is not None for c in self._choices)

    def _check_whole(self) -> None:
        if not self._is_whole:
            raise ServiceLostError("the generator", "it ended before the answer did")

    def _ended(self, choice: Choice, text: str, tokens: list[Token]) -> Ended:
        self._check_whole()
        assert choice.finish_reason is not None
        return Ended(choice.index, text, tokens, choice.finish_reason)

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(p) for p in self._asked.prompts)
        completion_tokens = sum(len(c.text.ids) for c in self._choices)
        return usage_of(prompt_tokens, completion_tokens, (c.acceptance for c in self._choices))


def _event(part: BaseModel) -> bytes:
    return b"data: " + part.model_dump_json(exclude_none=False).encode() + b"\n\n"


def _error_event(error: LongtailError) -> bytes:
    return b"data: " + json.dumps(body_of(error)).encode() + b"\n\n"
