"""The part of the API that anyone may read. Answers are shared between readers; see `cache`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Path, Query, Response
from pydantic import BaseModel

from services.gateway.cache import Body, Shared, body_of
from services.gateway.run_reader import RunSnapshot
from services.gateway.schema import (
    Evaluations,
    Events,
    Lengths,
    Problem,
    RunDetail,
    RunList,
    Spans,
    Steps,
    Strategies,
    Versions,
)
from services.gateway.settings import Settings
from services.gateway.source import RunSource

PAGE = 2000  # rows in one answer, unless fewer are asked for
KEPT_ANSWERS = 64

RunIdPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,149}$", description="As in the list of runs.")]
Since = Annotated[int, Query(ge=0, le=2**53, description="Cursor: `next` of the answer before; 0 for all.")]
Limit = Annotated[int, Query(ge=1, le=PAGE, description="At most so many rows; ask again for more.")]
IfNoneMatch = Annotated[str | None, Header(description="The ETag of the answer that is at hand already.")]
Row = TypeVar("Row")

LIMITS: dict[int | str, dict[str, Any]] = {
    408: {"model": Problem, "description": "The request took too long."},
    413: {"model": Problem, "description": "The body is too long."},
    414: {"model": Problem, "description": "Path and query are too long."},
    421: {"model": Problem, "description": "This server does not answer under that host name."},
}
SHARED: dict[int | str, dict[str, Any]] = {304: {"description": "As before: the ETag matches."}, **LIMITS}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "There is no such run."}, **SHARED}


def page(rows: Sequence[Row], count: int, since: int, limit: int) -> tuple[tuple[Row, ...], int]:
    """(rows, next cursor) of the first `count` rows from `since` on."""
    start = min(since, count)
    end = min(count, start + limit)
    return tuple(rows[start:end]), end


def answer(body: Body, if_none_match: str | None) -> Response:
    known = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
    headers = {"etag": body.etag}
    if body.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(body.content, media_type="application/json", headers=headers)


class _Readings:
    """What routes share: snapshots of runs and the answers made from them."""

    def __init__(self, source: RunSource, fresh_s: float) -> None:
        self.source = source
        self._snapshots: Shared[RunSnapshot] = Shared(fresh_s, keep=8)
        self._bodies: Shared[Body] = Shared(fresh_s, keep=KEPT_ANSWERS)

    async def of_run(self, run_id: str, key: tuple[object, ...], make: Callable[[RunSnapshot], BaseModel]) -> Body:
        run = await self._snapshots.get(run_id, lambda: self.source.run(run_id))
        return await self._bodies.get((run_id, *key), lambda: _json(make(run)))

    async def other(self, key: str, make: Callable[[], BaseModel]) -> Body:
        return await self._bodies.get(key, lambda: _json(make()))


def _json(model: BaseModel) -> Body:
    return body_of(model.model_dump_json().encode())


def read_router(source: RunSource, settings: Settings, controlled: bool) -> APIRouter:
    """`controlled`: whether control requests are taken."""
    router = APIRouter(prefix="/api/v1", tags=["read"])
    readings = _Readings(source, settings.fresh_s)

    @router.get("/runs", responses=SHARED, response_model=RunList)
    async def list_runs(if_none_match: IfNoneMatch = None) -> Response:
        """Every run that there is."""
        body = await readings.other("runs", lambda: RunList(runs=tuple(source.runs()), control=controlled))
        return answer(body, if_none_match)

    @router.get("/runs/{run_id}", responses=UNKNOWN, response_model=RunDetail)
    async def get_run(run_id: RunIdPath, if_none_match: IfNoneMatch = None) -> Response:
        """What a run does now and what it came to."""
        return answer(await readings.of_run(run_id, ("detail",), lambda run: run.detail), if_none_match)

    @router.get("/runs/{run_id}/versions", responses=UNKNOWN, response_model=Versions)
    async def list_versions(run_id: RunIdPath, if_none_match: IfNoneMatch = None) -> Response:
        """Which policy and which drafter version was published when."""
        return answer(await readings.of_run(run_id, ("versions",), lambda run: run.versions), if_none_match)

    @router.get("/runs/{run_id}/strategies", responses=UNKNOWN, response_model=Strategies)
    async def get_strategies(run_id: RunIdPath, if_none_match: IfNoneMatch = None) -> Response:
        """Which draft strategy runs at how many requests, and why."""
        return answer(await readings.of_run(run_id, ("strategies",), lambda run: run.strategies), if_none_match)

    @router.get("/runs/{run_id}/lengths", responses=UNKNOWN, response_model=Lengths)
    async def get_lengths(
        run_id: RunIdPath,
        step: Annotated[int | None, Query(ge=0, le=99_999, description="Default: the last one.")] = None,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """Response lengths of one step's rollouts."""
        body = await readings.of_run(run_id, ("lengths", step), lambda run: source.lengths(run, step))
        return answer(body, if_none_match)

    _add_rows(router, readings)
    return router


def _add_rows(router: APIRouter, readings: _Readings) -> None:
    """Lists that grow: from a cursor on, so that a reader gets each row once."""

    def steps(run: RunSnapshot, since: int, limit: int) -> Steps:
        items, following = page(run.steps, run.detail.num_steps_done, since, limit)
        return Steps(items=items, next=following)

    def evaluations(run: RunSnapshot, since: int, limit: int) -> Evaluations:
        items, following = page(run.evaluations, run.detail.num_evaluations, since, limit)
        return Evaluations(items=items, next=following)

    def spans(run: RunSnapshot, since: int, limit: int) -> Spans:
        items, following = page(run.spans, run.detail.num_spans, since, limit)
        return Spans(items=items, next=following, open=run.open_spans)

    def events(run: RunSnapshot, since: int, limit: int) -> Events:
        items, following = page(run.events, run.detail.num_events, since, limit)
        return Events(items=items, next=following)

    def add(
        name: str, model: type[BaseModel], make: Callable[[RunSnapshot, int, int], BaseModel], summary: str
    ) -> None:
        async def rows(
            run_id: RunIdPath, since: Since = 0, limit: Limit = PAGE, if_none_match: IfNoneMatch = None
        ) -> Response:
            body = await readings.of_run(run_id, (name, since, limit), lambda run: make(run, since, limit))
            return answer(body, if_none_match)

        router.add_api_route(
            f"/runs/{{run_id}}/{name}", rows, methods=["GET"], response_model=model, responses=UNKNOWN,
            name=f"list_{name}", description=summary,
        )  # fmt: skip

    add("steps", Steps, steps, "One row per step that was recorded.")
    add("evaluations", Evaluations, evaluations, "Held-out evaluations.")
    add("spans", Spans, spans, "Who used which slot when; `open` is what goes on now.")
    add("events", Events, events, "What is worth telling: losses, returns, published drafters, control requests.")
