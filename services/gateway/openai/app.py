"""`build_openai_app`: the OpenAI API over a generator."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from services.core.errors import LongtailError, ServiceLostError
from services.core.generation import Generation, Generator
from services.core.protocols import Clock
from services.gateway.control_api import SCHEME, guarded_route
from services.gateway.guard import App, Guard
from services.gateway.openai.answering import Answering, ClientGone, unless_gone
from services.gateway.openai.answers import ChatCompletion, Completion, Health, Model, ModelList
from services.gateway.openai.choice import ChatStyle, CompletionStyle, Head, Style
from services.gateway.openai.errors import REFUSALS, FieldError, error_body, http_problem, not_valid, refused
from services.gateway.openai.metrics import CLIENT_GONE, CONTENT_TYPE, Counted, ServingMetrics
from services.gateway.openai.plan import DrawSeed, plan_chat, plan_completion
from services.gateway.openai.requests import Asked, ChatRequest, CompletionRequest
from services.gateway.openai.settings import ServingSettings, fingerprint
from services.gateway.openai.text import TextCodec
from services.gateway.settings import Settings

SPARE_S = 15.0  # the guard's limit is the later one: the answer in time-out should be ours
STREAMED: dict[str, Any] = {
    "description": "The answer; with `stream`, server-sent events of its chunks, `data: [DONE]` at the end.",
    "content": {
        "text/event-stream": {
            "schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        }
    },
}
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_openai_app(
    generator: Generator,
    codec: TextCodec,
    settings: ServingSettings,
    now: Callable[[], float] = time.time,
    draw_seed: DrawSeed = lambda: secrets.randbits(48),
    lifespan: Lifespan | None = None,
    clock: Clock = time.monotonic,
) -> App:
    """An ASGI application. With a token in the settings every request but /health must bear it."""
    metrics = ServingMetrics(settings.model)
    app = FastAPI(
        title="Longtail serving",
        description="A policy with its drafter, behind the OpenAI API.",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.include_router(_router(_Service(generator, codec, settings, now, draw_seed, metrics, clock)))
    app.include_router(_metrics_router(generator, settings, metrics))

    @app.get("/health", name="health")
    async def health() -> Health:
        return Health()

    app.add_exception_handler(LongtailError, refused)
    app.add_exception_handler(HTTPException, http_problem)
    app.add_exception_handler(RequestValidationError, not_valid)
    _leave_out_422(app)
    guard = Settings(
        token=settings.token,
        hosts=settings.hosts,
        max_body_bytes=settings.max_body_bytes,
        request_s=settings.request_s + SPARE_S,
    )
    return Counted(Guard(app, guard, error_body), metrics, clock)


class _Service:
    def __init__(
        self,
        generator: Generator,
        codec: TextCodec,
        settings: ServingSettings,
        now: Callable[[], float],
        draw_seed: DrawSeed,
        metrics: ServingMetrics,
        clock: Clock,
    ) -> None:
        self.settings, self.codec, self.draw_seed = settings, codec, draw_seed
        self._generator, self._now = generator, now
        self._metrics, self._clock = metrics, clock

    async def model(self) -> Model:
        settings, versions = self.settings, await self._generator.served()
        return Model(
            id=settings.model, created=settings.created, versions=fingerprint(versions), max_model_len=settings.max_len
        )

    def check_model(self, name: str) -> None:
        if name != self.settings.model:
            message = f"there is no model {name!r} here: ask for {self.settings.model!r}"
            raise FieldError("model", message, 404, "model_not_found")

    async def answer(self, asked: Asked, plan: Generation, style: Style, request: Request) -> Response:
        answering = Answering(plan, self.codec, style, self._make_head(style))
        try:
            if asked.stream:
                return await self._streamed(answering, plan, asked.wants_usage, request)
            made = await unless_gone(request, answering.whole(self._generator), self.settings.request_s)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)  # nobody reads it
        return Response(made.model_dump_json(), media_type="application/json")

    async def _streamed(self, answering: Answering, plan: Generation, usage: bool, request: Request) -> Response:
        """The status is sent when the first token is there, so that a refusal still has one of its own."""
        deadline_s, started = asyncio.get_running_loop().time() + self.settings.request_s, self._clock()
        news = self._generator.generate(plan)
        first = await unless_gone(request, anext(news, None), self.settings.request_s)
        if first is None:
            raise ServiceLostError("the generator", "it ended before it began")
        self._metrics.first_token(self._clock() - started)
        events: AsyncIterator[bytes] = answering.events(first, news, usage, deadline_s)
        return StreamingResponse(events, media_type="text/event-stream")

    def _make_head(self, style: Style) -> Callable[[str], Head]:
        created, name = int(self._now()), f"{style.prefix}-{secrets.token_hex(12)}"
        return lambda made_by: Head(name, created, self.settings.model, made_by)


def _router(service: _Service) -> APIRouter:
    settings = service.settings
    guarded = settings.token is not None
    router = APIRouter(
        prefix="/v1",
        tags=["openai"],
        route_class=guarded_route(settings.token) if guarded else APIRoute,
        dependencies=[Security(SCHEME)] if guarded else [],  # for the schema
        responses=REFUSALS,
    )

    @router.get("/models", name="models")
    async def models() -> ModelList:
        return ModelList(data=[await service.model()])

    @router.get("/models/{name:path}", name="model")
    async def model(name: str) -> Model:
        service.check_model(name)
        return await service.model()

    @router.post("/completions", name="completions", response_model=Completion, responses={200: STREAMED})
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        service.check_model(asked.model)
        plan = plan_completion(asked, service.codec, settings, service.draw_seed)
        return await service.answer(asked, plan, CompletionStyle(asked.logprobs is not None), request)

    @router.post("/chat/completions", name="chat", response_model=ChatCompletion, responses={200: STREAMED})
    async def chat(asked: ChatRequest, request: Request) -> Response:
        service.check_model(asked.model)
        plan = plan_chat(asked, service.codec, settings, service.draw_seed)
        return await service.answer(asked, plan, ChatStyle(asked.logprobs), request)

    return router


def _metrics_router(generator: Generator, settings: ServingSettings, metrics: ServingMetrics) -> APIRouter:
    """For Prometheus; no part of the API."""
    guarded = settings.token is not None
    router = APIRouter(route_class=guarded_route(settings.token) if guarded else APIRoute)

    @router.get("/metrics", include_in_schema=False)
    async def tell() -> Response:
        return Response(metrics.text(await generator.views()), media_type=CONTENT_TYPE)

    return router


def _leave_out_422(app: FastAPI) -> None:
    """FastAPI promises its own answer to what is not valid; here that is a 400."""
    schema = app.openapi()
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for unused in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(unused, None)
