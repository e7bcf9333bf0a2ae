"""A panel as plain data, and the words of PromQL that panels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RATE = "[$__rate_interval]"
STEPS = "[$window]"  # for what a run tells once a step: longer than a step
WHERE = 'run_id=~"$run"'

Draw = Literal["lines", "stacked", "timeline", "stat"]


@dataclass(frozen=True)
class Query:
    """`legend` names a series by its labels, "{{slot}}"."""

    expr: str
    legend: str


@dataclass(frozen=True)
class PanelSpec:
    """`unit` is Grafana's; `width` in columns of 24. `text` says what one should see in the panel."""

    title: str
    text: str
    queries: tuple[Query, ...]
    unit: str = "short"
    draw: Draw = "lines"
    width: int = 8
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RowSpec:
    title: str
    panels: tuple[PanelSpec, ...]


@dataclass(frozen=True)
class DashboardSpec:
    """`of`: what a person chooses from, runs or served models; the label and the variable are called alike."""

    uid: str
    title: str
    text: str
    rows: tuple[RowSpec, ...]
    of: Literal["run", "model"] = "run"


def pick(name: str, **labels: str) -> str:
    """The series of a metric in the chosen runs. A label's value may begin with its operator: "=~slot .*", "!=off"."""
    return f"longtail_{name}{{{','.join((WHERE, *(_match(*label) for label in labels.items())))}}}"


def _match(label: str, value: str) -> str:
    operator = next((o for o in ("=~", "!~", "!=") if value.startswith(o)), "")
    return f'{label}{operator or "="}"{value.removeprefix(operator)}"'


def rate(name: str, by: str = "", over: str = RATE, **labels: str) -> str:
    """Per second, summed over everything but `by`: the sum comes last, so that a counter's restart stays one."""
    return f"sum by (run_id{', ' + by if by else ''}) (rate({pick(name, **labels)}{over}))"


def grown(name: str, by: str = "") -> str:
    """How much it grew within the window for steps."""
    return f"sum by (run_id{', ' + by if by else ''}) (increase({pick(name)}{STEPS}))"


def quantile(share: float, name: str, by: str = "") -> str:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', by='le' + (', ' + by if by else ''), over=STEPS)})"


def lines(title: str, text: str, expr: str, legend: str, unit: str = "short", width: int = 8) -> PanelSpec:
    return PanelSpec(title, text, (Query(expr, legend),), unit, width=width)


def stacked(title: str, text: str, expr: str, legend: str, unit: str = "short", width: int = 8) -> PanelSpec:
    return PanelSpec(title, text, (Query(expr, legend),), unit, "stacked", width, low=0)


def quantiles(title: str, text: str, name: str, unit: str) -> PanelSpec:
    """The median, and what one in ten and one in a hundred exceeds."""
    queries = tuple(Query(quantile(share, name), f"p{share * 100:.0f}") for share in (0.5, 0.9, 0.99))
    return PanelSpec(title, text, queries, unit, low=0)
