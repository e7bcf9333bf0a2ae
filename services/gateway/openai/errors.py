"""Refusals in the shape that OpenAI's clients read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from services.core.errors import (
    DataError,
    LongtailError,
    OverloadedError,
    RequestError,
    ServiceLostError,
    WaitTimeoutError,
)

STATUS: dict[type[LongtailError], int] = {
    RequestError: 400,
    DataError: 400,
    OverloadedError: 429,
    ServiceLostError: 503,
    WaitTimeoutError: 504,
}
NOT_SERVED = "not_served"  # pydantic's type of the problem, with `field` in its context
CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded", 504: "timeout"}


class ErrorDetail(BaseModel):
    """`param`: the field of the request that is at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "Something in the request cannot be served; `param` names it."},
    401: {"model": ErrorAnswer, "description": "No token, or not the right one."},
    404: {"model": ErrorAnswer, "description": "There is no such model."},
    405: {"model": ErrorAnswer, "description": "The path does not take this method."},
    408: {"model": ErrorAnswer, "description": "The request took too long to arrive."},
    413: {"model": ErrorAnswer, "description": "The body is too long."},
    414: {"model": ErrorAnswer, "description": "The path is too long."},
    421: {"model": ErrorAnswer, "description": "Not under this host name."},
    429: {"model": ErrorAnswer, "description": "Too much waits already; Retry-After says for how long to stay away."},
    503: {"model": ErrorAnswer, "description": "Who made the answer was lost; nothing of it was told."},
    504: {"model": ErrorAnswer, "description": "The answer took too long; what was begun of it is dropped."},
}


class FieldError(LongtailError):
    """A field of the request that is known and not served; nothing was started."""

    def __init__(self, param: str, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    detail = ErrorDetail(message=_plain(message), type=kind, param=param and _plain(param),
                         code=code or CODES.get(status))  # fmt: skip
    return ErrorAnswer(error=detail).model_dump()


def body_of(error: LongtailError) -> dict[str, Any]:
    """The same for an error in the middle of a stream, where there is no status any more."""
    if isinstance(error, FieldError):
        return error_body(error.status, str(error), error.param, error.code)
    return error_body(_status(error), str(error))


async def refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LongtailError)
    status = error.status if isinstance(error, FieldError) else _status(error)
    wait = {"Retry-After": str(error.retry_after_s)} if isinstance(error, OverloadedError) else None
    return JSONResponse(body_of(error), status, wait)


async def http_problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)


async def not_valid(_: Request, error: Exception) -> JSONResponse:
    """One of the problems that pydantic found. What was sent is not repeated: it may be no text at all."""
    assert isinstance(error, RequestValidationError)
    problem = _most_telling(error.errors())
    param = problem.get("ctx", {}).get("field") if problem["type"] == NOT_SERVED else _param(problem["loc"])
    if problem["type"] == "extra_forbidden":
        message = f"Unrecognized request argument: {param}"
    else:
        told = problem["msg"].removeprefix("Value error, ")
        message = told if param is None or problem["type"] == NOT_SERVED else f"{param}: {told}"
    return JSONResponse(error_body(400, message, param), 400)


def _most_telling(problems: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of the first field with a problem, what was found deepest: where a field may be a text or a list of them,
    pydantic also tells that a list is no text."""
    first = [p for p in problems if p["loc"][:2] == problems[0]["loc"][:2]]
    return max(first, key=lambda p: len(p["loc"]))


def _param(loc: Sequence[str | int]) -> str | None:
    """The path of the field; pydantic goes on with names of its own for what a field may be."""
    fields = itertools.takewhile(lambda part: "[" not in part and part not in ("str", "int"), map(str, loc[1:]))
    return ".".join(fields) or None


def _status(error: LongtailError) -> int:
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)


def _plain(text: str) -> str:
    """Text that can be sent: a half of a surrogate pair, which JSON lets through, cannot."""
    return text.encode("utf-8", "replace").decode()
