"""`build_app`: the live page and the API over a source of runs and a way to control them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from services.core.errors import ControlRefusedError, LongtailError, ServiceLostError, UnknownRunError, WaitTimeoutError
from services.gateway.channel import ControlChannel
from services.gateway.control_api import control_router
from services.gateway.guard import Guard
from services.gateway.pages import page_router
from services.gateway.read_api import read_router
from services.gateway.settings import Settings
from services.gateway.source import RunSource

STATUS: dict[type[LongtailError], int] = {
    UnknownRunError: 404,
    ControlRefusedError: 409,
    ServiceLostError: 503,
    WaitTimeoutError: 504,
}


def build_app(source: RunSource, control: ControlChannel | None, settings: Settings) -> Guard:
    """An ASGI application. Without `control` or without a token it is read-only."""
    app = FastAPI(
        title="Longtail",
        description="Runs of Longtail: read without a token, control with one.",
        version="1",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # its page would load assets from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(read_router(source, settings, controlled=control is not None and settings.token is not None))
    app.include_router(control_router(source, control, settings))
    app.include_router(page_router(source))
    app.add_exception_handler(LongtailError, _problem)
    return Guard(app, settings)


async def _problem(_: Request, error: Exception) -> JSONResponse:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    return JSONResponse({"detail": str(error)}, status)
