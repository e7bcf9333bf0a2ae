"""Stacked bars over steps: time per phase, and the strategies in use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.report.figure import HALF, Figure, table
from services.report.records import Row, number
from services.report.run_data import RunData
from services.report.strategy_section import strategy_totals
from services.report.svg import Frame, both_sizes, fmt, path_of

_MAX_BARS = 90
_MAX_BAR_WIDTH = 56


@dataclass(frozen=True)
class Bars:
    """Stacked bars: `values[i][k]` is part k of bar i; `lines` are drawn over them on the same scale."""

    labels: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]  # (class, label)
    values: tuple[tuple[float, ...], ...]
    lines: tuple[tuple[str, str, tuple[float, ...]], ...] = ()  # (class, label, one value per bar)


def _binned(rows: Sequence[Row], count: int) -> list[list[Row]]:
    per = max(1, math.ceil(len(rows) / count))
    return [list(rows[i : i + per]) for i in range(0, len(rows), per)]


def _bin_label(rows: Sequence[Row]) -> str:
    first, last = rows[0].get("step"), rows[-1].get("step")
    return f"{first}" if first == last else f"{first}\u2013{last}"


def _mean(rows: Sequence[Row], key: str) -> float:
    return sum(number(r, key) or 0.0 for r in rows) / len(rows)


def _draw_bars(width: int, bars: Bars, unit: str, label: str, digits: int, height: int = 250) -> str:
    top = max([sum(v) for v in bars.values] + [max(values) for _, _, values in bars.lines] + [1e-9])
    frame = Frame(width, height, (0, len(bars.values)), (0, top * 1.05))
    frame.y_axis(unit)
    base = frame.height - frame.bottom
    frame.line(frame.left, base, frame.width - frame.right, base, "base")
    every = math.ceil(len(bars.labels) * (max(map(len, bars.labels)) * 6.5 + 14) / (width - 60))
    for i, parts in enumerate(bars.values):
        x, end, below = frame.px(i), frame.px(i + 1), 0.0
        gap = max(min(4.0, (end - x) * 0.2), end - x - _MAX_BAR_WIDTH)
        for (cls, name), value in zip(bars.parts, parts, strict=True):
            if value > 0:
                y, bottom = frame.py(below + value), frame.py(below)
                tip = f"step {bars.labels[i]}, {name}: {fmt(value, digits)}"
                frame.rect(x + gap / 2, y, end - x - gap, bottom - y, cls, tip)
                below += value
        if i % every == 0:
            frame.text((x + end) / 2, base + 16, bars.labels[i], "t", "middle")
    for cls, _, values in bars.lines:
        points = [(i + 0.5, v) for i, v in enumerate(values)]
        frame.add(f'<path d="{path_of(frame, points)}" class="line halo"/>')
        frame.add(f'<path d="{path_of(frame, points)}" class="line {cls} over"/>')
        for i, value in enumerate(values if len(values) <= 12 else ()):
            frame.dot(
                frame.px(i + 0.5), frame.py(value), 2.4, f"dot {cls}", f"step {bars.labels[i]}: {fmt(value, digits)}"
            )
    frame.text(frame.width - frame.right, frame.height - 5, "step", "t unit", "end")
    return frame.render(label)


_PHASES = ("rollout", "reward", "policy", "publish")


def phase_figure(run: RunData) -> Figure:
    """Wall seconds per phase and step, with the slots' idle and drafting seconds over it."""
    title = "Time per step"
    if not run.steps:
        return Figure("phases", title, "", "")
    bins = _binned(run.steps, _MAX_BARS)
    bars = Bars(
        labels=tuple(_bin_label(b) for b in bins),
        parts=tuple((f"p-{p}", p) for p in _PHASES),
        values=tuple(tuple(_mean(b, f"{p}_s") for p in _PHASES) for b in bins),
        lines=tuple(
            (c, n, tuple(_mean(b, f"{n}_s") for b in bins)) for c, n in (("c-idle", "idle"), ("c-draft", "drafting"))
        ),
    )
    label = (
        "Stacked bars: seconds per step in rollout, reward, policy and publish, with idle and drafting seconds as lines"
    )
    svg = both_sizes(lambda w: _draw_bars(w, bars, "seconds", label, 2), HALF)
    keys = [*(f"{p}_s" for p in _PHASES), "idle_s", "drafting_s"]
    rows = [[str(r.get("step")), *(fmt(number(r, k)) for k in keys)] for r in run.steps]
    legend = (*bars.parts, *((f"l-{c}", f"{n}, summed over slots") for c, n, _ in bars.lines))
    caption = "Bars are wall time. The lines add up all slots, so they can be higher than the bars."
    return Figure("phases", title, caption, svg, legend, table(("step", *(k.replace("_s", ", s") for k in keys)), rows))


def strategy_figure(run: RunData) -> Figure:
    """Share of verify and plain decode steps per strategy."""
    title = "Strategies in use"
    totals = strategy_totals(run)
    if not sum(totals.values()):
        return Figure("strategies", title, "", "")
    ranked = list(totals)
    drafting = [n for n in ranked if n != "off"]
    shown, rest = drafting[:5], drafting[5:]
    bins = _binned(run.steps, _MAX_BARS)
    parts = [(f"s{i}", n) for i, n in enumerate(shown)] + ([("s5", "other")] if rest else [])
    parts += [("soff", "off")] if "off" in totals else []
    values = []
    for rows in bins:
        count = {n: float(sum((r.get("steps_by_strategy") or {}).get(n, 0) for r in rows)) for n in totals}
        whole = sum(count.values()) or 1.0
        share = [count[n] for n in shown] + ([sum(count[n] for n in rest)] if rest else [])
        values.append(tuple(100 * v / whole for v in share + ([count["off"]] if "off" in totals else [])))
    bars = Bars(tuple(_bin_label(b) for b in bins), tuple(parts), tuple(values))
    label = "Share of decode steps per strategy: " + ", ".join(f"{n} {fmt(totals[n], 0)}" for n in ranked[:6])
    svg = both_sizes(lambda w: _draw_bars(w, bars, "% of decode steps", label, 0, 200), 1160)
    table_rows = [
        [str(r.get("step")), *(str((r.get("steps_by_strategy") or {}).get(n, 0)) for n in ranked)] for r in run.steps
    ]
    caption = "Verify steps by the strategy that drafted for them; \u201coff\u201d counts plain decode steps."
    numbers = table(("step", *ranked), table_rows)
    return Figure("strategies", title, caption, svg, tuple(parts), numbers, full_width=True)
