"""The part of the API that changes something: one bearer token, compared in constant time."""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.coordinator.control import Action, ControlRequest
from services.gateway.channel import ControlChannel
from services.gateway.read_api import RunIdPath
from services.gateway.schema import ControlAnswer, Problem, SelectorRequest
from services.gateway.settings import Settings
from services.gateway.source import RunSource

SCHEME = HTTPBearer(auto_error=False, description="The token that `longtail page` made, or LONGTAIL_TOKEN.")
PLAIN: tuple[Action, ...] = ("pause", "resume", "checkpoint", "stop")
MEANING: dict[Action, str] = {
    "pause": "Pause when the step under way is done.",
    "resume": "Go on after a pause.",
    "checkpoint": "Write a checkpoint when the step under way is done.",
    "stop": "Stop at the next safe point; the run folder stays valid.",
    "selector": "Use one strategy from the next step on, or give the choice back to the selector.",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No token, or not the right one."},
    403: {"model": Problem, "description": "This server takes no control requests."},
    404: {"model": Problem, "description": "There is no such run."},
    408: {"model": Problem, "description": "The request took too long."},
    409: {"model": Problem, "description": "The run cannot do that now."},
    413: {"model": Problem, "description": "The body is too long."},
    503: {"model": Problem, "description": "The run cannot be reached."},
    504: {"model": Problem, "description": "The run did not answer in time."},
}


def control_router(source: RunSource, control: ControlChannel | None, settings: Settings) -> APIRouter:
    def authorised(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(SCHEME)],
    ) -> ControlChannel:
        """Before anything else is looked at: who has no token learns nothing about runs or bodies."""
        if control is None or settings.token is None:
            raise HTTPException(403, "this server is read-only: start it with a token to control runs")
        given = credentials.credentials if credentials else ""
        if not hmac.compare_digest(given.encode(), settings.token.encode()):
            raise HTTPException(401, "send the token as `Authorization: Bearer TOKEN`", {"WWW-Authenticate": "Bearer"})
        return control

    async def send(channel: ControlChannel, run_id: str, request: ControlRequest) -> ControlAnswer:
        await asyncio.to_thread(source.run, run_id)  # raises UnknownRunError
        message = await asyncio.to_thread(channel.send, run_id, request)
        return ControlAnswer(run_id=run_id, action=request.action, message=message)

    Channel = Annotated[ControlChannel, Depends(authorised)]
    router = APIRouter(prefix="/api/v1/runs/{run_id}/control", tags=["control"])
    options: dict[str, Any] = {"status_code": 202, "response_model": ControlAnswer, "responses": REFUSALS}

    def add_plain(action: Action) -> None:
        async def ask(channel: Channel, run_id: RunIdPath) -> ControlAnswer:
            return await send(channel, run_id, ControlRequest(action))

        router.add_api_route(f"/{action}", ask, methods=["POST"], name=action, description=MEANING[action], **options)

    for action in PLAIN:
        add_plain(action)

    @router.post("/selector", name="selector", description=MEANING["selector"], **options)
    async def selector(channel: Channel, run_id: RunIdPath, body: SelectorRequest) -> ControlAnswer:
        return await send(channel, run_id, ControlRequest("selector", body.strategy))

    return router
