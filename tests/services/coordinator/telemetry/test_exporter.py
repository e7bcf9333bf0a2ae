"""What is scraped over HTTP: only values that are safe with the driver."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from services.config.schema import MetricsConfig
from services.coordinator.resume import Takeover
from services.coordinator.telemetry.exporter import PERIOD_S, Exporter, open_metrics, period_s
from services.coordinator.telemetry.facts import NO_TELEMETRY
from services.coordinator.telemetry.run_metrics import RunMetrics
from services.core.errors import ConfigError
from services.core.types import RunEvent
from tests.services.coordinator.fakes import FakeClock
from tests.services.coordinator.world import tiny_config


class Exporting:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metrics = RunMetrics(tiny_config(), "r1", self.clock, lambda weights, blob: None)
        self.exporter = Exporter(MetricsConfig(), self.metrics, self.clock)

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.exporter.port}/metrics", timeout=120) as answer:
            return str(answer.read().decode())

    def events(self) -> float | None:
        line = next((r for r in self.scrape().splitlines() if 'kind="slot_lost"' in r), None)
        return None if line is None else float(line.rpartition(" ")[2])

    def lose_one(self) -> None:
        self.metrics.event(RunEvent(0.0, "slot_lost", "rollout-0", ""))


@pytest.fixture
def exporting() -> Iterator[Exporting]:
    found = Exporting()
    yield found
    found.exporter.close()


def test_nothing_is_served_before_it_is_safe(exporting: Exporting) -> None:
    """Row 76: what Prometheus has seen, the next coordinator must be able to go on from."""
    assert exporting.events() is None
    exporting.lose_one()
    assert exporting.exporter.offer() is not None
    assert exporting.events() is None, "offered, but the driver may not have it"
    exporting.exporter.acknowledge()
    exporting.lose_one()
    assert exporting.events() == 1


def test_values_are_offered_once_a_period_unless_the_run_ends(exporting: Exporting) -> None:
    assert exporting.exporter.offer() is not None and exporting.exporter.offer() is None
    assert exporting.exporter.offer(force=True) is not None
    exporting.clock.now += PERIOD_S
    assert exporting.exporter.offer() is not None


def test_the_values_of_many_slots_are_offered_less_often() -> None:
    assert [period_s(slots) for slots in (1, 200, 600, 4096)] == [PERIOD_S, PERIOD_S, 3.0, 5.0]
    clock = FakeClock()
    exporter = Exporter(MetricsConfig(), RunMetrics(tiny_config(), "r", clock, lambda w, b: None), clock, 3.0)
    try:
        assert exporter.offer() is not None
        clock.now += 2.9
        assert exporter.offer() is None
        clock.now += 0.1
        assert exporter.offer() is not None
    finally:
        exporter.close()


def test_prometheus_own_tool_finds_nothing_to_complain_about(exporting: Exporting) -> None:
    exporting.exporter.offer()
    exporting.exporter.acknowledge()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exporting.scrape(), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_taken_port_is_told_with_the_remedy(exporting: Exporting) -> None:
    config = MetricsConfig(port=exporting.exporter.port)
    with pytest.raises(ConfigError, match=r"coordinator\.metrics\.port"):
        Exporter(config, exporting.metrics, exporting.clock)


def test_null_means_none() -> None:
    config = tiny_config(coordinator={"metrics": None})
    assert open_metrics(config, "r1", FakeClock(), lambda weights, blob: None) == (NO_TELEMETRY, None)


@pytest.mark.parametrize("resumed", [False, True])
def test_it_goes_on_from_a_takeover_and_from_a_run_that_is_resumed(resumed: bool) -> None:
    takeover = Takeover(1, 0.0, values={"longtail_steps_total": [41.0]}, resumed=resumed)
    metrics, exporter = open_metrics(tiny_config(), "r1", FakeClock(), lambda weights, blob: None, takeover)
    assert isinstance(metrics, RunMetrics) and exporter is not None
    exporter.close()
    state = metrics.read()
    assert state["longtail_steps_total"] == (41.0,)
    assert state["longtail_coordinator_restarts_total"] == (float(not resumed),)
