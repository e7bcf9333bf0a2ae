"""Our own pictures of the dashboards' panels, from real query results: what Grafana would show, not how it draws.

`python -m deploy.monitoring.picture PROMETHEUS_URL RUN_ID START END --out FOLDER` asks every panel's queries for that
time (Unix seconds) and draws one SVG per dashboard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.monitoring.grafana import COLOURS, FOLDER
from deploy.monitoring.queries import Line, PrometheusApi, fill, flat_panels, named
from services.coordinator.telemetry.labels import STATES
from services.report.svg import Frame, esc, fmt, path_of, tick_label, ticks

WIDTH, UNIT, GAP, TOP = 1440, 34, 10, 74
POINTS = 180
PALETTE = ("#3c6fb4", "#e0912f", "#58a08b", "#7d62ad", "#c8453b", "#c9b04a", "#8a8f98", "#c06c84", "#2d8fb0", "#7a9a3a")
CSS = (
    "text{fill:#24272c}.t{font-size:11px;fill:#5d636d}.t.strong{fill:#24272c}.grid{stroke:#e9eae6}.base{stroke:#b9bcc2}"
    ".title{font-size:13px;font-weight:600}.row{font-size:15px;font-weight:650}.big{font-size:19px}"
)
Named = list[tuple[str, Line]]


def colour_of(name: str, place: int) -> str:
    return COLOURS.get(name) or PALETTE[place % len(PALETTE)]


def amount(value: float, unit: str) -> str:
    """A value with its unit, short."""
    if unit == "percentunit":
        return f"{fmt(100 * value, 0)} %"
    suffix = {"s": " s", "bytes": " B", "Bps": " B/s", "watt": " W", "joule": " J", "cpm": "/min"}.get(unit, "")
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= 10 * size or (abs(value) >= size and suffix.startswith(" B")):
            return f"{fmt(value / size, 1)}{letter}{suffix.strip()}"
    return f"{fmt(value, 0 if float(value).is_integer() else 2)}{suffix}"


class PanelPicture:
    """One panel as an SVG group of the size that Grafana would give it. `window`: Unix seconds, first and last."""

    def __init__(self, panel: Mapping[str, Any], found: Named, window: tuple[float, float]) -> None:
        self._panel, self._window = panel, window
        self._found = [(n, line) for n, line in found if any(math.isfinite(v) for _, v in line.points)]
        box = panel["gridPos"]
        self._width = int(box["w"] * WIDTH / 24) - GAP
        self._height = int(box["h"] * UNIT) - GAP
        self._unit = panel["fieldConfig"]["defaults"]["unit"]

    def draw(self) -> str:
        body = [f'<rect width="{self._width}" height="{self._height}" rx="6" fill="#ffffff" stroke="#e2e3df"/>']
        body.append(f'<text x="12" y="21" class="title">{esc(self._panel["title"])}</text>')
        if not self._found:
            body.append(f'<text x="12" y="{self._height / 2:.0f}" class="t">no data in this run</text>')
        elif self._panel["type"] == "stat":
            body.append(self._stat())
        elif self._panel["type"] == "state-timeline":
            body.append(self._timeline())
        else:
            body.append(self._series())
        return "".join(body)

    def _stat(self) -> str:
        parts, row = [], (self._height - 40) / max(1, len(self._found))
        for i, (name, line) in enumerate(self._found):
            y = 40 + row * (i + 0.6)
            value = amount(line.points[-1][1], self._unit)
            parts.append(f'<text x="16" y="{y:.0f}" class="big">{esc(value)}</text>')
            parts.append(f'<text x="76" y="{y:.0f}" class="t">{esc(name)}</text>')
        return "".join(parts)

    def _frame(self, low: float, high: float) -> Frame:
        span = (0.0, self._window[1] - self._window[0])
        return Frame(self._width, self._height, span, (low, high), left=58, right=12, top=34, bottom=40)

    def _timeline(self) -> str:
        frame, start = self._frame(0, 1), self._window[0]
        row = (self._height - 34 - 58) / len(self._found)
        for i, (name, line) in enumerate(sorted(self._found)):
            y = 34 + row * i
            frame.text(50, y + row / 2 + 4, name, "t strong", "end")
            for at_s, role, seconds in runs(line, self._window[1]):
                x, wide = frame.px(at_s - start), frame.px(seconds) - frame.px(0)
                frame.add(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.2f}" height="{row - 8:.1f}" '
                          f'fill="{COLOURS[role]}"/>')  # fmt: skip
        frame.bottom = 58
        frame.x_axis("", count=10)
        return "".join(frame.parts) + self._legend([(state.value, COLOURS[state.value]) for state in STATES])

    def _series(self) -> str:
        stacked = self._panel["fieldConfig"]["defaults"]["custom"].get("stacking", {}).get("mode") == "normal"
        curves = stack(self._found) if stacked else [(n, line.points, ()) for n, line in self._found]
        values = [v for _, top, _ in curves for _, v in top if math.isfinite(v)]
        low, high = limits(values, self._panel["fieldConfig"]["defaults"].get("min"))
        frame = self._frame(low, high)
        self._y_axis(frame)
        frame.x_axis("", count=max(3, self._width // 110))
        for i, (name, top, base) in reversed(list(enumerate(curves))):
            frame.add(self._curve(frame, top, base, colour_of(name, i)))
        return "".join(frame.parts) + self._legend([(n, colour_of(n, i)) for i, (n, _, _) in enumerate(curves)])

    def _curve(self, frame: Frame, top: Any, base: Any, colour: str) -> str:
        start = self._window[0]
        line = path_of(frame, [(t - start, v) for t, v in top])
        drawn = f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
        if base and line:
            points = [*top, *reversed(base)]
            area = path_of(frame, [(t - start, v if math.isfinite(v) else 0.0) for t, v in points])
            drawn = f'<path d="{area}Z" fill="{colour}" fill-opacity="0.55"/>{drawn}'
        return drawn

    def _y_axis(self, frame: Frame) -> None:
        values = ticks(*frame.y, 4)
        step = values[1] - values[0] if len(values) > 1 else 1.0
        for value in values:
            y = frame.py(value)
            frame.line(frame.left, y, frame.width - frame.right, y, "grid")
            text = self._tick(value, step)
            frame.text(frame.left - 6, y + 4, text, "t", "end")

    def _tick(self, value: float, step: float) -> str:
        if self._unit not in ("short", "s") or abs(value) >= 1e4:
            return amount(value, self._unit)
        if step < 1e-3:
            return f"{value:.1e}" if value else "0"
        return tick_label(value, step)

    def _legend(self, entries: Sequence[tuple[str, str]]) -> str:
        parts, x = [], 14.0
        for name, colour in entries:
            if x + 18 + 6.1 * len(name) > self._width:
                parts.append(f'<text x="{x:.0f}" y="{self._height - 8}" class="t">…</text>')
                break
            parts.append(f'<rect x="{x:.0f}" y="{self._height - 17}" width="9" height="9" rx="2" fill="{colour}"/>')
            parts.append(f'<text x="{x + 13:.0f}" y="{self._height - 8}" class="t">{esc(name)}</text>')
            x += 26 + 6.1 * len(name)
        return "".join(parts)


def with_gaps(line: Line, longest_s: float) -> Line:
    """With a point that is no number wherever there was no sample, so that no line is drawn across."""
    out: list[tuple[float, float]] = []
    for at_s, value in line.points:
        if out and at_s - out[-1][0] > longest_s:
            out.append((out[-1][0] + longest_s / 2, math.nan))
        out.append((at_s, value))
    return Line(line.labels, tuple(out))


def runs(line: Line, end_s: float) -> list[tuple[float, str, float]]:
    """(from, role, seconds) of a slot's state, neighbours of one role joined."""
    out: list[tuple[float, str, float]] = []
    for (at_s, code), following in zip(line.points, [*(t for t, _ in line.points[1:]), end_s], strict=True):
        if math.isnan(code):
            continue
        role = STATES[int(code)].value
        if out and out[-1][1] == role and math.isclose(out[-1][0] + out[-1][2], at_s, abs_tol=1e-3):
            out[-1] = (out[-1][0], role, out[-1][2] + following - at_s)
        else:
            out.append((at_s, role, following - at_s))
    return out


def stack(found: Named) -> list[tuple[str, list[tuple[float, float]], list[tuple[float, float]]]]:
    """(name, upper edge, lower edge), one upon another; what is missing adds nothing."""
    times = sorted({t for _, line in found for t, _ in line.points})
    base, out = dict.fromkeys(times, 0.0), []
    for name, line in found:
        values = {t: v for t, v in line.points if math.isfinite(v)}
        top = {t: base[t] + values.get(t, 0.0) for t in times}
        out.append((name, list(top.items()), list(base.items())))
        base = top
    return out


def limits(values: Sequence[float], least: float | None) -> tuple[float, float]:
    low, high = min(values), max(values)
    if least is not None:
        low = least
    pad = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    at_bottom = low == least or 0 <= low < pad
    return (max(0.0, least or 0.0) if at_bottom else low - pad), high + pad


def draw_dashboard(board: Mapping[str, Any], api: PrometheusApi, run_id: str, window: tuple[float, float]) -> str:
    """One SVG of every panel, where the dashboard has it."""
    span_s = window[1] - window[0]
    intervals, step_s = (f"{max(10, round(span_s / 30))}s", f"{max(20, round(span_s / 4))}s"), span_s / POINTS
    groups, bottom = [], 0.0
    for panel in board["panels"]:
        box = panel["gridPos"]
        x, y = 10 + box["x"] * WIDTH / 24, TOP + box["y"] * UNIT
        if panel["type"] == "row":
            groups.append(f'<text x="{x + 4:.0f}" y="{y + 22:.0f}" class="row">{esc(panel["title"])}</text>')
            continue
        found: Named = []
        for target in panel["targets"]:
            expr = fill(target["expr"], run_id, *intervals)
            lines = (with_gaps(s, 1.5 * step_s) for s in api.query_range(expr, *window, step_s))
            found += [(named(s, target["legendFormat"]), s) for s in lines]
        groups.append(f'<g transform="translate({x:.0f} {y:.0f})">{PanelPicture(panel, found, window).draw()}</g>')
        bottom = max(bottom, y + box["h"] * UNIT)
    when = datetime.fromtimestamp(window[0], UTC).strftime("%Y-%m-%d %H:%M UTC")
    note = f"Drawn by Longtail from the panels' own queries over run {run_id}, seconds from {when}; "
    note += "not a picture of Grafana."
    return _page(board["title"], note, groups, bottom + 14)


def _page(title: str, note: str, groups: Sequence[str], height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 20} {height:.0f}" role="img" '
        f'aria-label="{esc(title)}" font-family="system-ui, sans-serif">'
        f"<style>{CSS}</style>"
        f'<rect width="{WIDTH + 20}" height="{height:.0f}" fill="#f6f6f4"/>'
        f'<text x="14" y="30" font-size="20" font-weight="650">{esc(title)}</text>'
        f'<text x="14" y="52" class="t">{esc(note)}</text>'
    )
    return head + "".join(groups) + "</svg>\n"


def run_boards() -> dict[str, dict[str, Any]]:
    """The dashboards that show a run, by name; that of served models shows none."""
    boards = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}
    return {n: b for n, b in boards.items() if any(v["name"] == "run" for v in b["templating"]["list"])}


def main(
    url: str,
    run_id: str,
    start_s: Annotated[float, typer.Argument()],
    end_s: Annotated[float, typer.Argument()],
    out: Annotated[Path, typer.Option()] = Path("docs"),
) -> None:
    api = PrometheusApi(url)
    for name, board in run_boards().items():
        assert list(flat_panels(board)), f"{name} has no panel"
        picture = out / f"{name}.svg"
        picture.write_text(draw_dashboard(board, api, run_id, (start_s, end_s)), encoding="utf-8")
        print(picture)


if __name__ == "__main__":
    typer.run(main)
