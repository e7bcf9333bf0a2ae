"""Line charts: acceptance length and reward over steps. Without data a chart says so and draws no empty frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.report.figure import HALF, Figure, table
from services.report.records import Row, number
from services.report.run_data import RunData
from services.report.svg import Frame, both_sizes, fmt, path_of, spread_labels

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line. `style` adds CSS classes ("dash", "faint"); `error[i]` is a half-width drawn as a whisker."""

    label: str
    cls: str
    points: tuple[Point, ...]
    style: str = ""
    dots: bool = False
    error: tuple[float, ...] = ()
    end_label: bool = True

    @property
    def known(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if y is not None]


def _range(values: Sequence[float], least: float) -> tuple[float, float]:
    """A range a little wider than the values and at least `least` wide."""
    low, high = min(values), max(values)
    pad = max(0.08 * (high - low), (least - (high - low)) / 2, 0.0)
    return low - pad, high + pad


def _end_labels(frame: Frame, series: Sequence[Series]) -> None:
    ends = [(s, *s.known[-1]) for s in series if s.known and s.end_label]
    spots = spread_labels([frame.py(y) + 4 for _, _, y in ends], 13, frame.top, frame.height - frame.bottom)
    for (one, x, y), spot in zip(ends, spots, strict=True):
        frame.text(frame.px(x) + 8, spot, fmt(y), f"t end {one.cls}-t")


def _draw_lines(width: int, series: Sequence[Series], y: tuple[float, float], unit: str, label: str) -> str:
    xs = [x for s in series for x, _ in s.known]
    low, high = min(xs), max(xs)
    pad = 0.02 * (high - low) or 1.0
    frame = Frame(width, 250, (low - pad, high + pad), y, right=48)
    frame.y_axis(unit)
    frame.x_axis("step", count=max(3, width // 80), whole=True)
    for one in series:
        frame.add(f'<path d="{path_of(frame, one.points)}" class="line {one.cls} {one.style}"/>')
        alone = len(one.known) == 1
        for i, (px, py) in enumerate(one.known):
            if i < len(one.error) and one.error[i] > 0:
                low, high = max(y[0], py - one.error[i]), min(y[1], py + one.error[i])
                frame.line(frame.px(px), frame.py(low), frame.px(px), frame.py(high), f"whisker {one.cls}")
            if one.dots or alone:
                frame.dot(frame.px(px), frame.py(py), 3.6, f"dot {one.cls}", f"{one.label}, step {px:g}: {fmt(py, 3)}")
    _end_labels(frame, series)
    return frame.render(label)


def _line_figure(
    key: str,
    title: str,
    caption: str,
    unit: str,
    series: Sequence[Series],
    least: float,
    rows: tuple[tuple[str, ...], ...],
) -> Figure:
    drawn = [s for s in series if s.known]
    if not drawn:
        return Figure(key, title, "", "")
    head, body = rows[0], rows[1:]
    values = [y for s in drawn for _, y in s.known]
    values += [y + d for s in drawn for (_, y), e in zip(s.known, s.error, strict=False) for d in (-e, e)]
    y = _range(values, least)
    label = f"{title}: " + "; ".join(f"{s.label} from {fmt(s.known[0][1])} to {fmt(s.known[-1][1])}" for s in drawn)
    svg = both_sizes(lambda w: _draw_lines(w, drawn, y, unit, label), HALF)
    legend = tuple((f"l-{s.cls} {s.style}".strip(), s.label) for s in drawn)
    return Figure(key, title, caption, svg, legend, table(head, body))


def _points(rows: Sequence[Row], key: str) -> tuple[Point, ...]:
    return tuple((float(r.get("step", i + 1)), number(r, key)) for i, r in enumerate(rows))


def acceptance_figure(run: RunData) -> Figure:
    """Acceptance length over steps: measured, and offline for the live and the frozen drafter on the same rollouts."""
    keys = ("acceptance_length", "acceptance_length_live_offline", "acceptance_length_frozen_offline")
    series = [
        Series("live, measured by the engine", "c1", _points(run.steps, keys[0])),
        Series("live, offline", "c2", _points(run.steps, keys[1])),
        Series("frozen first drafter, offline", "c3", _points(run.steps, keys[2]), style="dash"),
    ]
    rows = tuple((str(r.get("step")), *(fmt(number(r, k), 3) for k in keys)) for r in run.steps)
    caption = (
        "Mean tokens committed per verify step, bonus token included; 1 is plain decoding. The two offline lines score "
        "both drafters on the same rollouts, so they compare with each other, not with the engine's line."
    )
    head = ("step", "live, engine", "live, offline", "frozen, offline")
    return _line_figure(
        "acceptance", "Acceptance length", caption, "tokens per verify step", series, 0.2, (head, *rows)
    )


def _smooth(points: Sequence[Point], reach: int) -> tuple[Point, ...]:
    out: list[Point] = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - reach) : i + reach + 1] if y is not None]
        out.append((x, sum(near) / len(near) if near else None))
    return tuple(out)


def heldout_error(row: Row) -> float:
    """Two standard errors of a held-out pass rate, counting prompts (rollouts of one prompt are not independent)."""
    rate, prompts = number(row, "correct_fraction"), number(row, "num_prompts")
    if rate is None or not prompts or not 0 <= rate <= 1:
        return 0.0
    return 2 * math.sqrt(rate * (1 - rate) / prompts)


def reward_figure(run: RunData) -> Figure:
    train = _points(run.steps, "reward_mean")
    heldout = _points(run.evaluations, "reward_mean")
    errors = tuple(heldout_error(r) for r in run.evaluations if number(r, "reward_mean") is not None)
    smooth = len(train) >= 12
    series = [Series("training mean per step", "c1", train, "faint" if smooth else "", end_label=not smooth)]
    if smooth:
        series.append(Series("training, mean of 5 steps", "c1", _smooth(train, 2)))
    series.append(Series("held-out", "c4", heldout, "dash", dots=True, error=errors))
    rows = [(str(r.get("step")), fmt(number(r, "reward_mean"), 3), "") for r in run.steps]
    rows += [(str(r.get("step")), "", fmt(number(r, "reward_mean"), 3)) for r in run.evaluations]
    caption = "Whiskers span two standard errors over held-out prompts."
    head = ("step", "training", "held-out")
    return _line_figure("reward", "Reward", caption, "mean reward", series, 0.1, (head, *rows))
