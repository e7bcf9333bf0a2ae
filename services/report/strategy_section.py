"""The page's section on the selector: which strategy ran, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.core.types import StrategySpan
from services.report.figure import Figure, Table, table
from services.report.records import number
from services.report.run_data import RunData
from services.report.strategies import bucket_rows, by_strategy, of_steps, percent, sentences
from services.report.strategy_strip import draw_strip
from services.report.svg import both_sizes, esc
from services.report.timeline import longest_tail, step_window

_WIDE = 1160


def strategy_totals(run: RunData) -> dict[str, float]:
    """Verify steps of requests by strategy over the whole run, the most used one first."""
    totals: dict[str, float] = {}
    for row in run.steps:
        for name, count in (row.get("steps_by_strategy") or {}).items():
            totals[name] = totals.get(name, 0.0) + count
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def colours_of(run: RunData) -> dict[str, str]:
    """CSS classes by strategy, the same in every drawing of the page: five of their own, one for all others."""
    names = dict.fromkeys([*strategy_totals(run), *(u.strategy for u in by_strategy(run.strategies))])
    drafting = [name for name in names if name != "off"]
    return {**{name: f"s{min(i, 5)}" for i, name in enumerate(drafting)}, "off": "soff"}


def strategy_section(run: RunData) -> str:
    """Empty when the run's engine told nothing of its rounds."""
    if not run.strategies:
        return ""
    counted = of_steps(run.strategies) or list(run.strategies)
    told = "".join(f"<li>{esc(text)}</li>" for text in sentences(counted, run.steps))
    words = (
        f'<div class="card full"><ul class="findings plain">{told}</ul>{_bucket_table(counted).html(_CAPTION)}</div>'
    )
    figures = "".join(figure.html() for figure in _figures(run))
    return (
        '<section aria-label="Strategies"><h2>Which strategy ran, and why</h2>'
        f'<div class="grid">{words}{figures}</div></section>'
    )


_CAPTION = "Share of the rounds with so many running requests at a server, training steps"


def _bucket_table(spans: Sequence[StrategySpan]) -> Table:
    return table(*bucket_rows(spans, "times the speed of OFF"))


def _figures(run: RunData) -> list[Figure]:
    """The whole run, and the step with the longest tail."""
    colours, used = colours_of(run), {s.strategy for s in run.strategies}
    legend = (*((cls, name) for name, cls in colours.items() if name in used), ("l-running", "running requests"))
    window = (0.0, max(run.end_s, *(s.end_s for s in run.strategies)))
    caption = "The colour is the strategy that the selector chose, the line how many requests ran at the slot's server."
    figures = [_figure("strips", "Strategies over the run", caption, run.strategies, colours, window, legend)]
    tail = longest_tail(run)
    step = tail.step if tail else _last_step(run)
    zoom = step_window(run, step) if step is not None else None
    mine = [s for s in run.strategies if s.label == f"step {step}"]
    if zoom and mine:
        # generating is a part of the step: training the policy comes behind it
        part = (min(s.start_s for s in mine), min(zoom[1], max(s.end_s for s in mine)))
        text = f"Its rollout. Why each stretch ran is in its bar's tooltip, and in longtail explain --step {step}."
        figures.append(_figure("strip-step", f"Strategies in step {step}", text, mine, colours, part, legend))
    return figures


def _last_step(run: RunData) -> int | None:
    steps = [int(step) for row in run.steps if (step := number(row, "step")) is not None]
    return max(steps, default=None)


def _figure(
    key: str,
    title: str,
    caption: str,
    spans: Sequence[StrategySpan],
    colours: Mapping[str, str],
    window: tuple[float, float],
    legend: tuple[tuple[str, str], ...],
) -> Figure:
    label = f"{title}: " + ", ".join(
        f"{u.strategy} in {percent(u.share)} of the rounds" for u in by_strategy(spans)[:6]
    )
    svg = both_sizes(lambda w: draw_strip(spans, colours, window, w, label), _WIDE)
    return Figure(key, title, caption, svg, legend, full_width=True)
