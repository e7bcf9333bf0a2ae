"""The live page: one document, its style sheet and its scripts, all from here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException
from fastapi import Path as PathParameter
from fastapi.responses import Response

from services.gateway.cache import body_of
from services.gateway.read_api import IfNoneMatch, RunIdPath
from services.gateway.source import RunSource
from services.report.style import STYLE

FOLDER = Path(__file__).parent / "assets"
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
# A report has its style sheet within; it has no script, and can have none here.
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def _assets() -> dict[str, bytes]:
    files = {f.name: f.read_bytes() for f in FOLDER.iterdir() if f.suffix in TYPES}
    return {**files, "page.css": STYLE.encode() + files["page.css"]}  # the report's look, and what only the page has


def page_router(source: RunSource) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    document = body_of((FOLDER / "page.html").read_bytes())
    assets = {name: body_of(content) for name, content in _assets().items()}

    @router.get("/")
    async def page(if_none_match: IfNoneMatch = None) -> Response:
        if if_none_match == document.etag:
            return Response(status_code=304, headers={"etag": document.etag})
        return Response(document.content, media_type="text/html; charset=utf-8", headers={"etag": document.etag})

    @router.get("/assets/{name}")
    async def asset(name: Annotated[str, PathParameter(max_length=100)], if_none_match: IfNoneMatch = None) -> Response:
        body = assets.get(name)
        if body is None:
            raise HTTPException(404, "there is no such file")
        if if_none_match == body.etag:
            return Response(status_code=304, headers={"etag": body.etag})
        return Response(body.content, media_type=TYPES[Path(name).suffix], headers={"etag": body.etag})

    @router.get("/runs/{run_id}/report")
    async def report(run_id: RunIdPath) -> Response:
        content = await asyncio.to_thread(lambda: source.report(source.run(run_id)))
        if content is None:
            raise HTTPException(404, "the report is written when the run ends")
        headers = {"content-security-policy": REPORT_POLICY}
        return Response(content, media_type="text/html; charset=utf-8", headers=headers)

    return router
