"""Requests made up from the schema of the OpenAI API, valid and not: never a server error, always what was promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.deploy.serving_app import OFF, arguments, served_here

pytestmark = pytest.mark.timeout(400)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MADE_UP = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
OPERATIONS = [("/v1/completions", "POST"), ("/v1/chat/completions", "POST"), ("/v1/models/{name}", "GET")]
Api = Any


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with served_here(arguments(OFF, allow_hosts=("testserver",))) as made:
        yield schemathesis.openapi.from_asgi("/openapi.json", made.app)


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [(*o, m) for o in OPERATIONS for m in GenerationMode if o[1] == "POST" or m is GenerationMode.POSITIVE],
)
def test_made_up_requests(api: Api, path: str, method: str, mode: GenerationMode) -> None:
    """Half of the bodies name the model that there is: made-up names would all end at 404."""
    strategy, seen = api[path][method].as_strategy(generation_mode=mode), Counter[int]()

    @MADE_UP
    @given(case=strategy)
    def made_up(case: Case) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "pocket"
            if isinstance(case.body.get("max_tokens"), int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 8)
        response = case.call()
        case.validate_response(response, checks=CHECKS)
        seen[response.status_code] += 1

    made_up()
    if method == "POST" and mode is GenerationMode.POSITIVE:
        assert seen[200], f"nothing but {seen}"


@pytest.mark.parametrize("temperature", [1.6e-142, 1e-46, 1e-39, 1e-7])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    """Made-up requests found it: divided by what float32 makes of it, logits drew a token that there is not, which
    ended the model server."""
    with served_here(arguments(OFF)) as made:
        ask = {"model": "pocket", "prompt": "1+2=", "max_tokens": 12}
        cold, greedy = (made.client().completions.create(**ask, temperature=t) for t in (temperature, 0.0))
        assert cold.choices[0].text == greedy.choices[0].text != ""
