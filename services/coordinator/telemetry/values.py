"""The values behind the metrics, and the registry that shows them.

Values are plain numbers that can be taken out and put back, so a coordinator that takes over goes on counting where
the one before it stopped. prometheus_client's own counters and histograms cannot be set; its custom collectors can
show numbers of any origin, and that is what the registry gets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from services.coordinator.telemetry.labels import LabelValues
from services.coordinator.telemetry.table import BY_NAME, METRICS, Metric

# One entry per series, "name|label value|...": [value], of a histogram [sum, count per bucket ...].
State = Mapping[str, Sequence[float]]


class Values:
    """Counters and histograms begin at zero in every series; a gauge has no sample before it is set. Every sample
    shown has the run's id as a label besides, wherever it is scraped. Not thread-safe."""

    def __init__(self, labels: LabelValues, run_id: str) -> None:
        self._run_id = run_id
        # Ordered, and asked for membership with every value: a metric of thousands of slots has tens of thousands.
        self._series = {metric.name: dict.fromkeys(labels.series(metric.labels)) for metric in METRICS}
        self._numbers: dict[str, list[float]] = {}
        for metric in METRICS:
            for series in self._series[metric.name]:
                if metric.kind != "gauge":
                    self._numbers[_key(metric.name, series)] = [0.0] * _width(metric)

    def inc(self, name: str, amount: float, *series: str) -> None:
        assert BY_NAME[name].kind == "counter" and amount >= 0, f"{name} only grows, not by {amount}"
        self._known(name, series)[0] += amount

    def set(self, name: str, value: float, *series: str) -> None:
        assert BY_NAME[name].kind == "gauge" and series in self._series[name], f"{name} has no series {series}"
        self._numbers[_key(name, series)] = [float(value)]

    def observe(self, name: str, value: float, *series: str) -> None:
        metric = BY_NAME[name]
        assert metric.kind == "histogram"
        numbers = self._known(name, series)
        numbers[0] += value
        numbers[1 + bisect_left(metric.buckets, value)] += 1

    def total(self, name: str, *series: str) -> float:
        """A counter's or gauge's value; 0 for a gauge that was never set."""
        return self._numbers.get(_key(name, series), [0.0])[0]

    def _known(self, name: str, series: tuple[str, ...]) -> list[float]:
        numbers = self._numbers.get(_key(name, series))
        assert numbers is not None, f"{name} has no series {series}"
        return numbers

    def take(self) -> State:
        return {key: tuple(numbers) for key, numbers in self._numbers.items()}

    def put_back(self, state: State) -> None:
        """Go on from an earlier `take`. Series that this run does not have (its configuration is another one now, or
        another version wrote them) are left out."""
        for metric in METRICS:
            for series in self._series[metric.name]:
                earlier = state.get(_key(metric.name, series))
                if earlier is not None and len(earlier) == _width(metric):
                    self._numbers[_key(metric.name, series)] = [float(n) for n in earlier]

    def families(self, state: State) -> list[Family]:
        """What `take` gave, as Prometheus is told it. May be called from any thread."""
        return [self._family(metric, state) for metric in METRICS]

    def _family(self, metric: Metric, state: State) -> Family:
        name, labels = metric.name, ("run_id", *metric.labels)
        found = [(s, state.get(_key(name, s))) for s in self._series[name]]
        known = [((self._run_id, *series), numbers) for series, numbers in found if numbers is not None]
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=labels)
            for series, numbers in known:
                histogram.add_metric(series, _cumulative(metric, numbers), numbers[0])
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(name, metric.help, labels=labels)
        for series, numbers in known:
            family.add_metric(series, numbers[0])
        return family


def _width(metric: Metric) -> int:
    return 2 + len(metric.buckets) if metric.kind == "histogram" else 1


def _key(name: str, series: tuple[str, ...]) -> str:
    return "|".join((name, *series))


def _cumulative(metric: Metric, numbers: Sequence[float]) -> list[tuple[str, float]]:
    bounds, total, out = [*map(floatToGoString, metric.buckets), "+Inf"], 0.0, []
    for bound, count in zip(bounds, numbers[1:], strict=True):
        total += count
        out.append((bound, total))
    return out
