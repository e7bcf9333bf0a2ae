"""What is asked of all model servers, when some of them do not answer. With real servers: tests/deploy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.serving import HandleGenerator
from services.core.errors import ServiceLostError, WaitTimeoutError
from services.core.serving import ServerView
from services.core.types import ServedVersions

VIEW = ServerView("a", 1, 0, ServedVersions(1, 2), 0, 0, 5, 4, 3, 2)


class Handle:
    """Stands in for the handle of a deployment: `served` answers with `answer`, or raises it, or never ends (None)."""

    def __init__(self, answer: Any = None, told: Any = ()) -> None:
        self.served, self._answer, self._told = self, answer, told

    async def remote(self) -> Any:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def broadcast(self, method: str) -> Handle:
        assert method == "view"
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s == 0.05 and return_exceptions
        if isinstance(self._told, Exception):
            raise self._told
        return list(self._told)


def asking(**answers: Any) -> HandleGenerator:
    return HandleGenerator(Handle(**answers), 0.05)  # type: ignore[arg-type]


def test_versions_are_not_waited_for_for_ever() -> None:
    assert asyncio.run(asking(answer=ServedVersions(1, 2)).served()) == ServedVersions(1, 2)
    with pytest.raises(WaitTimeoutError, match=r"no model server told its versions within 0\.05 s"):
        asyncio.run(asking().served())
    with pytest.raises(ServiceLostError, match="its process died"):
        asyncio.run(asking(answer=RayActorError()).served())


def test_figures_are_of_the_servers_that_answer() -> None:
    assert asyncio.run(asking(told=[VIEW, RayActorError()]).views()) == (VIEW,)
    assert asyncio.run(asking(told=TimeoutError()).views()) == ()
