"""The end point that Prometheus scrapes.

It serves values that the run's driver has already been given. The driver outlives the coordinator and hands them to the
next one, so no counter ever falls below what somebody has seen: Prometheus would take that for a restart from zero and
count everything twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric as Family

from services.config.schema import ClusterConfig, MetricsConfig
from services.coordinator.resume import Takeover
from services.coordinator.telemetry.facts import NO_TELEMETRY, NoTelemetry
from services.coordinator.telemetry.run_metrics import RunMetrics, SizeOf
from services.coordinator.telemetry.values import State
from services.core.errors import ConfigError
from services.core.protocols import Clock

PERIOD_S = 1.0
# Taking the values out and sending them holds up the coordinator by some 40 ms for a thousand slots: less often there.
SLOTS_PER_S, LONGEST_PERIOD_S = 200, 5.0
# What an observer is told that the values must not lag behind: whoever has a step also has it in the totals.
AT_ONCE = frozenset({"step", "rollouts", "finish"})


class Exporter:
    """`offer` gives the values for safekeeping, once in `period_s`; `acknowledge` says that they are safe, and only
    then they are served. Both come from one thread. `host` and `port` are those in use; ConfigError when they cannot be
    taken."""

    def __init__(self, config: MetricsConfig, metrics: RunMetrics, clock: Clock, period_s: float = PERIOD_S) -> None:
        self._metrics, self._clock, self._period_s = metrics, clock, period_s
        self._served: State | None = None
        self._offered: State | None = None
        self._next_s = 0.0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            raise ConfigError(
                f"the metrics cannot be served at {config.host}:{config.port} ({error.strerror}): set "
                "coordinator.metrics.port to a free one, 0 takes any; or coordinator.metrics to null"
            ) from error
        self.host, self.port = config.host, int(self._server.server_port)

    def collect(self) -> Iterable[Family]:
        """For prometheus_client, in the thread of whoever scrapes: nothing is put together that nobody reads."""
        served = self._served
        return [] if served is None else self._metrics.families(served)

    def offer(self, force: bool = False) -> State | None:
        """The present values; None when it is not time yet, unless `force`."""
        now = self._clock()
        if now < self._next_s and not force:
            return None
        self._next_s = now + self._period_s
        self._offered = self._metrics.read()
        return self._offered

    def acknowledge(self) -> None:
        """What was offered last is safe."""
        if self._offered is not None:
            self._served, self._offered = self._offered, None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def open_metrics(
    config: ClusterConfig,
    run_id: str,
    clock: Clock,
    size_of: SizeOf,
    takeover: Takeover | None = None,
) -> tuple[RunMetrics | NoTelemetry, Exporter | None]:
    """The metrics of a run and what serves them, as `coordinator.metrics` says; they go on from those of the
    takeover."""
    section = config.coordinator.metrics
    if section is None:
        return NO_TELEMETRY, None
    if takeover is None:
        metrics = RunMetrics(config, run_id, clock, size_of)
    else:
        metrics = RunMetrics(config, run_id, clock, size_of, takeover.values, not takeover.resumed)
    return metrics, Exporter(section, metrics, clock, period_s(config.rollout.num_servers))


def period_s(num_slots: int) -> float:
    return min(LONGEST_PERIOD_S, max(PERIOD_S, num_slots / SLOTS_PER_S))
