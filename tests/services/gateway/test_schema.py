"""Requests made up from the OpenAPI schema, valid and not: never a server error, always an answer that was promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.services.gateway.runs import TOKEN, Runs, gateway

CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MADE_UP = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


OPERATIONS = [
    (path, method)
    for path, methods in cast(FastAPI, gateway(Path(__file__).parent).app).openapi()["paths"].items()
    for method in methods
]
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
Api = Any  # schemathesis' schema over the application


@pytest.fixture(scope="module")
def api(finished_root: Path) -> Api:
    runs = Runs()
    for path in finished_root.iterdir():
        runs.add(path.name)
    app = gateway(finished_root, runs, hosts=("*",))
    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", app)


def each_made_up(api: Api, path: str, method: str, look: Callable[[Case], None]) -> None:
    """`look` at made-up requests to one end point, valid ones and such that break the schema."""
    nothing_to_break = path == "/api/v1/runs"  # it has no parameters
    for mode in (GenerationMode.POSITIVE,) if nothing_to_break else GenerationMode:
        strategy = api[path][method].as_strategy(generation_mode=mode)

        @MADE_UP
        @given(case=strategy)
        def made_up(case: Case) -> None:
            look(case)

        made_up()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_the_schema_allows_and_forbids_is_answered_as_promised(api: Api, path: str, method: str) -> None:
    def look(case: Case) -> None:
        case.validate_response(case.call(headers=RIGHT), checks=CHECKS)

    each_made_up(api, path, method, look)


@pytest.mark.parametrize(("path", "method"), [o for o in OPERATIONS if "{run_id}" in o[0]])
def test_the_same_of_a_run_that_there_is(api: Api, path: str, method: str, finished_root: Path) -> None:
    """Made-up ids hardly ever meet a run, so that only 404 would be seen."""
    run_id = sorted(p.name for p in finished_root.iterdir())[0]
    seen: Counter[int] = Counter()

    def look(case: Case) -> None:
        case.path_parameters["run_id"] = run_id
        response = case.call(headers=RIGHT)
        case.validate_response(response, checks=CHECKS)
        seen[response.status_code] += 1

    each_made_up(api, path, method, look)
    assert seen[200] + seen[202] + seen[409], f"nothing but {seen}"


@pytest.mark.parametrize(("path", "method"), [o for o in OPERATIONS if o[1] == "post"])
def test_no_made_up_request_controls_without_the_token(api: Api, path: str, method: str) -> None:
    def look(case: Case) -> None:
        response = case.call(headers={"Authorization": "Bearer wrong"})
        assert response.status_code in (401, 404, 405, 413, 414), response.text

    each_made_up(api, path, method, look)
