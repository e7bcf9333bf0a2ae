"""What Prometheus scrapes: every metric of the table, by its name, kind and labels, with the numbers that were told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.coordinator.telemetry.table import SERVING, sample_names
from services.core.serving import LearningView, ServerView
from services.core.types import ServedVersions
from services.gateway.openai.metrics import Counted, ServingMetrics

LEARNING = LearningView(micro_steps=9, trained_tokens=900, exams=2, published=1, adopted=3, held_bytes=77, gain=0.25)


def view(server: str, learning: LearningView | None = LEARNING) -> ServerView:
    return ServerView(server, 2, 1, ServedVersions(3, 8), 4, 5, 1000, 600, 300, 500, learning)


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in found, f"{key} is told twice"
                found[key] = sample.value
    return found


def value(text: bytes, name: str, **labels: str) -> float:
    return samples(text)[f"longtail_serving_{name}", tuple(sorted({"model": "m", **labels}.items()))]


def test_every_metric_of_the_table_is_told_and_no_other() -> None:
    metrics = ServingMetrics("m")
    metrics.began()
    metrics.ended(200, 0.1)
    text = metrics.text([view("a"), view("b")])
    told = {family.name: family for family in text_string_to_metric_families(text.decode())}
    kinds = {m.name.removesuffix("_total"): m.kind for m in SERVING}
    assert {n: f.type for n, f in told.items() if not n.endswith("_created")} == kinds
    names = {name for name, _ in samples(text)}
    assert names == {name for m in SERVING for name in sample_names(m)}
    for metric in SERVING:
        for sample in told[metric.name.removesuffix("_total")].samples:
            if not sample.name.endswith("_created"):
                assert sample.labels.keys() - {"le"} == set(metric.labels)


def test_servers_are_told_apart_and_one_that_does_not_learn_says_nothing_about_it() -> None:
    text = ServingMetrics("m").text([view("a"), view("b", None)])
    assert value(text, "servers") == 2
    for server in "ab":
        assert value(text, "generated_tokens_total", server=server) == 1000
        assert value(text, "answers", server=server, state="waiting") == 1
        assert value(text, "version", server=server, weights="drafter") == 8
    assert value(text, "learn_published_total", server="a") == 1 and value(text, "learn_gain", server="a") == 0.25
    assert not any("learn" in name and ("server", "b") in labels for name, labels in samples(text))


def test_before_any_weights_and_without_servers_there_is_no_version() -> None:
    assert value(ServingMetrics("m").text([]), "servers") == 0
    nothing = ServerView("a", 0, 0, ServedVersions(None, None), 0, 0, 0, 0, 0, 0)
    text = ServingMetrics("m").text([nothing])
    assert not any(name.endswith("version") for name, _ in samples(text))


App = Callable[[Any, Any, Any], Any]


def asking(app: App, path: str = "/v1/completions") -> bytes:
    ticks = iter((1.0, 3.5))
    metrics = ServingMetrics("m")
    counted = Counted(app, metrics, lambda: next(ticks))

    async def send(message: Any) -> None: ...

    asyncio.run(counted({"type": "http", "path": path}, None, send))  # type: ignore[arg-type]
    return metrics.text([])


def test_a_request_is_counted_with_its_status_and_time() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 429})
        await send({"type": "http.response.body"})

    text = asking(app)
    assert value(text, "requests_total", code="429") == 1 and value(text, "open_requests") == 0
    assert value(text, "request_seconds_sum") == 2.5
    assert value(text, "request_seconds_bucket", le="1.0") == 0
    assert value(text, "request_seconds_bucket", le="3.0") == 1


def test_one_that_was_never_answered_is_told_as_gone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    assert value(asking(app), "requests_total", code="499") == 1


@pytest.mark.parametrize("path", ["/metrics", "/health"])
def test_scrapes_and_health_checks_are_no_requests(path: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    assert value(asking(app, path), "request_seconds_count") == 0


def test_an_application_that_fails_is_counted_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500})
        raise OSError("of this test")

    metrics = ServingMetrics("m")
    with pytest.raises(OSError, match="of this test"):
        asyncio.run(Counted(app, metrics, lambda: 0.0)({"type": "http", "path": "/x"}, None, _nothing))  # type: ignore[arg-type]
    text = metrics.text([])
    assert value(text, "requests_total", code="500") == 1 and value(text, "open_requests") == 0


async def _nothing(message: Any) -> None: ...
