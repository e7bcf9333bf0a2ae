"""What Prometheus is told about a model that is served: requests counted here, tokens and drafts by the model servers.

prometheus_client keeps what is counted here; what servers tell about themselves is shown as they told it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from services.coordinator.telemetry.table import SERVING
from services.core.protocols import Clock
from services.core.serving import LearningView, ServerView
from services.gateway.guard import App, Message, Receive, Scope, Send

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_GONE = 499
UNCOUNTED = ("/metrics", "/health")
_TABLE = {metric.name.removeprefix("longtail_serving_"): metric for metric in SERVING}
Rows = Iterator[tuple[str, tuple[str, ...], float | None]]  # name in the table, further labels, value


class ServingMetrics:
    """Of one process that answers requests."""

    def __init__(self, model: str) -> None:
        self._model, self._registry = model, CollectorRegistry()
        requests, seconds, first = (_TABLE[n] for n in ("requests_total", "request_seconds", "first_token_seconds"))
        named, own = ["model"], self._registry
        self._requests = Counter(requests.name, requests.help, list(requests.labels), registry=own)
        self._seconds = Histogram(seconds.name, seconds.help, named, buckets=seconds.buckets, registry=own)
        self._first = Histogram(first.name, first.help, named, buckets=first.buckets, registry=own)
        self._open = Gauge(_TABLE["open_requests"].name, _TABLE["open_requests"].help, named, registry=own)
        for begun in (self._seconds, self._first, self._open):
            begun.labels(model)  # at zero from the start
        self._requests.labels(model, "200")

    def began(self) -> None:
        self._open.labels(self._model).inc()

    def ended(self, status: int, seconds: float) -> None:
        self._open.labels(self._model).dec()
        self._requests.labels(self._model, str(status)).inc()
        self._seconds.labels(self._model).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.labels(self._model).observe(seconds)

    def text(self, views: Sequence[ServerView]) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry) + generate_latest(_told(self._model, views))


class _Shown(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Family]:
        return self._families


def _told(model: str, views: Sequence[ServerView]) -> CollectorRegistry:
    """The series of the model servers; a server that does not learn has none about learning."""
    found: dict[str, Family] = {"servers": _family("servers")}
    found["servers"].add_sample(_TABLE["servers"].name, {"model": model}, len(views))
    for view in views:
        for name, labels, value in _rows(view):
            if value is not None:
                family = found.setdefault(name, _family(name))
                values = (model, view.server, *labels)
                family.add_metric(values, value)  # type: ignore[attr-defined]  # of both kinds below
    registry = CollectorRegistry()
    registry.register(_Shown(found.values()))
    return registry


def _family(name: str) -> Family:
    metric = _TABLE[name]
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)


def _rows(view: ServerView) -> Rows:
    yield "answers", ("running",), view.running
    yield "answers", ("waiting",), view.waiting
    yield "refused_total", (), view.refused
    yield "generated_tokens_total", (), view.generated_tokens
    yield "draft_tokens_total", (), view.draft_tokens
    yield "accepted_tokens_total", (), view.accepted_tokens
    yield "verify_steps_total", (), view.verify_steps
    yield "swaps_total", (), view.swaps
    yield "version", ("policy",), view.versions.policy
    yield "version", ("drafter",), view.versions.drafter
    if view.learning is not None:
        yield from _learning_rows(view.learning)


def _learning_rows(learning: LearningView) -> Rows:
    yield "learn_micro_steps_total", (), learning.micro_steps
    yield "learn_tokens_total", (), learning.trained_tokens
    yield "learn_exams_total", (), learning.exams
    yield "learn_published_total", (), learning.published
    yield "learn_adopted_total", (), learning.adopted
    yield "learn_held_bytes", (), learning.held_bytes
    yield "learn_gain", (), learning.gain


class Counted:
    """The ASGI application around `app` that counts its requests, also those that `app` refuses before it looks at
    them."""

    def __init__(self, app: App, metrics: ServingMetrics, clock: Clock) -> None:
        self.app, self._metrics, self._clock = app, metrics, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            await self.app(scope, receive, send)
            return
        status, started = CLIENT_GONE, self._clock()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.began()
        try:
            await self.app(scope, receive, noted)
        finally:
            self._metrics.ended(status, self._clock() - started)
