"""The part of the API that changes something: one bearer token, compared in constant time."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from services.coordinator.control import Action, ControlRequest
from services.gateway.channel import ControlChannel
from services.gateway.read_api import LIMITS, RunIdPath
from services.gateway.schema import ControlAnswer, Problem, SelectorRequest
from services.gateway.settings import Settings
from services.gateway.source import RunSource

SCHEME = HTTPBearer(auto_error=False, description="The token that `longtail page` made, or LONGTAIL_TOKEN.")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
PLAIN: tuple[Action, ...] = ("pause", "resume", "checkpoint", "stop")
MEANING: dict[Action, str] = {
    "pause": "Pause when the step under way is done.",
    "resume": "Go on after a pause.",
    "checkpoint": "Write a checkpoint when the step under way is done.",
    "stop": "Stop at the next safe point; the run folder stays valid.",
    "selector": "Use one strategy from the next step on, or give the choice back to the selector.",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    **LIMITS,
    400: {"model": Problem, "description": "The body is no text."},
    401: {"model": Problem, "description": "No token, or not the right one."},
    403: {"model": Problem, "description": "This server takes no control requests."},
    404: {"model": Problem, "description": "There is no such run."},
    409: {"model": Problem, "description": "The run cannot do that now."},
    503: {"model": Problem, "description": "The run cannot be reached."},
    504: {"model": Problem, "description": "The run did not answer in time."},
}


def bears(request: Request, token: str) -> bool:
    """Whether the request carries the token; compared in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), token.encode())
    return scheme.lower() == "bearer" and right


def guarded_route(token: str | None) -> type[APIRoute]:
    """A route that looks at the token before anything else: who has none learns nothing about runs or bodies. (A
    dependency would run after the body was parsed.)"""

    def authorise(request: Request) -> None:
        if token is None:
            raise HTTPException(403, "this server is read-only: start it with a token to control runs")
        if not bears(request, token):
            raise HTTPException(401, "send the token as `Authorization: Bearer TOKEN`", {"WWW-Authenticate": "Bearer"})

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                authorise(request)
                return await handle(request)

            return guarded

    return GuardedRoute


def control_router(source: RunSource, control: ControlChannel | None, settings: Settings) -> APIRouter:
    async def send(run_id: str, request: ControlRequest) -> ControlAnswer:
        assert control is not None, "every route is guarded"
        await asyncio.to_thread(source.run, run_id)  # raises UnknownRunError
        message = await asyncio.to_thread(control.send, run_id, request)
        return ControlAnswer(run_id=run_id, action=request.action, message=message)

    router = APIRouter(
        prefix="/api/v1/runs/{run_id}/control",
        tags=["control"],
        route_class=guarded_route(None if control is None else settings.token),
        dependencies=[Security(SCHEME)],  # for the schema
    )
    options: dict[str, Any] = {"status_code": 202, "response_model": ControlAnswer, "responses": REFUSALS}

    def add_plain(action: Action) -> None:
        async def ask(run_id: RunIdPath) -> ControlAnswer:
            return await send(run_id, ControlRequest(action))

        router.add_api_route(f"/{action}", ask, methods=["POST"], name=action, description=MEANING[action], **options)

    for action in PLAIN:
        add_plain(action)

    @router.post("/selector", name="selector", description=MEANING["selector"], **options)
    async def selector(run_id: RunIdPath, body: SelectorRequest) -> ControlAnswer:
        return await send(run_id, ControlRequest("selector", body.strategy))

    return router
