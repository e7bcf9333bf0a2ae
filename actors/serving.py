"""A model server as a Ray Serve deployment, and the generator that asks the servers there are."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from services.core.errors import (
    DataError,
    LongtailError,
    OverloadedError,
    ServiceLostError,
    WaitTimeoutError,
    WeightError,
)
from services.core.generation import Generation, Increment
from services.core.serving import ServerView
from services.core.types import ServedVersions
from services.rollout.generator import EngineGenerator, ModelWeights

LOST = (RayActorError, ReplicaUnavailableError)
TRIES = 3
TELL_S = 10.0  # for what a server knows at once
SWAP_S = 600.0  # longer than any request may take
LOG = logging.getLogger("ray.serve")


class ModelServer:
    """One replica: an engine with its weights. `read` makes weights of what `reconfigure` is told."""

    def __init__(self, build: Callable[[], EngineGenerator], read: Callable[[Any], ModelWeights]) -> None:
        self._generator, self._read = build(), read

    async def reconfigure(self, source: dict[str, Any]) -> None:
        """Serve these weights; requests under way end on those they began with. What cannot be loaded later on is
        told in the log and by `served`, and the replica goes on with what it has."""
        try:
            weights = await asyncio.to_thread(self._read, source)
            await self._generator.swap(weights, SWAP_S)
        except (DataError, WeightError) as error:
            if self._generator.versions.policy is None:
                raise
            LOG.error("not swapped, %s goes on being served: %s", self._generator.versions, error)

    async def generate(self, asked: Generation) -> AsyncGenerator[Increment, None]:
        async for news in self._generator.generate(asked):
            yield news

    async def served(self) -> ServedVersions:
        return await self._generator.served()

    async def view(self) -> ServerView:
        return self._generator.view(serve.get_replica_context().replica_id.unique_id)

    async def check_health(self) -> None:
        self._generator.check()

    async def process_id(self) -> int:
        return os.getpid()


class HandleGenerator:
    """Over a deployment's handle. When the server that answers is lost, another one begins anew as long as the client
    was told nothing: always for an answer that is told at its end, with `stream` before the first token."""

    def __init__(self, handle: DeploymentHandle, tell_s: float = TELL_S) -> None:
        self._handle, self._tell_s = handle, tell_s

    async def generate(self, asked: Generation) -> AsyncGenerator[Increment, None]:
        for attempt in range(TRIES):
            told, held = 0, list[Increment]()
            try:
                async for news in self._ask(asked):
                    if asked.stream:
                        told += 1
                        yield news
                    else:
                        held.append(news)
            except LOST as error:
                if told or attempt == TRIES - 1:
                    raise ServiceLostError("the model server", f"its process died ({type(error).__name__})") from error
                continue
            for news in held:
                yield news
            return

    async def _ask(self, asked: Generation) -> AsyncGenerator[Increment, None]:
        answer = self._handle.options(stream=True).generate.remote(asked)
        try:
            async for news in answer:
                yield news
        except BackPressureError as error:
            raise OverloadedError("too many requests wait for a model server already: try again later") from error
        except RayTaskError as error:
            if isinstance(error.cause, LongtailError):
                raise error.cause from None
            raise
        finally:
            answer.cancel()  # nothing to end when it has ended

    async def served(self) -> ServedVersions:
        try:
            async with asyncio.timeout(self._tell_s):
                found: ServedVersions = await self._handle.served.remote()
        except TimeoutError:
            raise WaitTimeoutError(f"no model server told its versions within {self._tell_s:g} s") from None
        except LOST as error:
            raise ServiceLostError("the model server", f"its process died ({type(error).__name__})") from error
        return found

    async def views(self) -> tuple[ServerView, ...]:
        """Of those that answer in time."""
        try:
            told = await self._handle.broadcast("view").results_async(timeout_s=self._tell_s, return_exceptions=True)
        except TimeoutError:
            return ()
        return tuple(view for view in told if isinstance(view, ServerView))
