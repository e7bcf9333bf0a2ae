"""The queries of the dashboards, asked of a running Prometheus as Grafana would ask them."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.errors import RequestError

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class PanelQuery:
    """One target of one panel of a dashboard's JSON. `draw` is the panel's type in Grafana."""

    dashboard: str
    panel: str
    draw: str
    expr: str
    legend: str

    def filled(self, run: str, interval: str, window: str) -> str:
        return fill(self.expr, run, interval, window)


@dataclass(frozen=True)
class Line:
    """A series: its labels and points (Unix time, value)."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


def panel_queries(folder: Path) -> Iterator[PanelQuery]:
    """Of every dashboard in `folder`, in order."""
    for file in sorted(folder.glob("*.json")):
        board = json.loads(file.read_text(encoding="utf-8"))
        for panel in flat_panels(board):
            for target in panel.get("targets", ()):
                yield PanelQuery(board["title"], panel["title"], panel["type"], target["expr"], target["legendFormat"])


def flat_panels(board: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Panels that show something, also those inside of folded rows."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels") or ()
        else:
            yield panel


def metric_names(expr: str) -> set[str]:
    """The names of our metrics in an expression."""
    return set(re.findall(r"\blongtail_[a-z0-9_]+", expr))


def fill(expr: str, run: str, interval: str, window: str) -> str:
    """With Grafana's variables replaced: `run` is a pattern of run ids, the others durations such as "20s"."""
    return expr.replace("$__rate_interval", interval).replace("$window", window).replace("$run", run)


class PrometheusApi:
    """Raises RequestError with Prometheus' own words for a query that it refuses."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def query(self, expr: str) -> list[Line]:
        found = self._ask("query", {"query": expr})
        return [Line(s["metric"], ((float(s["value"][0]), float(s["value"][1])),)) for s in found]

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[Line]:
        asked = {"query": expr, "start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:g}"}
        found = self._ask("query_range", asked)
        return [Line(s["metric"], tuple((float(t), float(v)) for t, v in s["values"])) for s in found]

    def _ask(self, what: str, asked: Mapping[str, str]) -> list[Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                result: list[Any] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            message = json.loads(error.read()).get("error", error.reason)
            raise RequestError(f"Prometheus refuses {asked['query']}: {message}") from error
        except (urllib.error.URLError, TimeoutError) as error:
            raise RequestError(f"no answer from Prometheus at {self._url}: {error}") from error
        return result


def named(line: Line, legend: str) -> str:
    """The series' name as the panel's legend makes it."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: line.labels.get(found[1], ""), legend)
