"""A drawing of a simulation: speed-up, idle time and message load by the number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2
from typing import Any

from services.core.errors import DataError
from services.report.svg import Frame, esc, fmt, path_of

_COLOURS = ("#3c6fb4", "#e0912f", "#3f8f5b", "#a3508f", "#7a6a4f", "#c0504d")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#5c636e}.head{font-weight:600;fill:#2b2f36}.grid{stroke:#ecedea}"
    ".base{stroke:#c9cbc7}.line{fill:none;stroke-width:2.2}.band{fill:none;stroke-width:9;stroke-opacity:.28}"
)
_WIDTH, _HEIGHT, _LEGEND_ROW = 420, 260, 18

Row = Mapping[str, Any]
Value = Callable[[Row], float | None]


def draw_scaling(rows: Sequence[Row]) -> str:
    """`rows` as in simulation.json. A stand-alone SVG of three panels."""
    if not rows:
        raise DataError("nothing was simulated: there is nothing to draw")
    learned = [r for r in rows if r["mode"] != "off"]
    full = [r for r in rows if r["mode"] == "full"] or list(rows)
    panels = [
        _panel("Simulated step, times as fast as OFF", _series(learned, lambda r: r["speedup_over_off"])),
        _panel(
            "Slot time without work (wide), training (thin), %",
            _series(full, lambda r: 100 * r["freed_share"] * r["reclaimed_share"]),
            _series(full, lambda r: 100 * r["freed_share"]),
        ),
        _panel("Answers to the coordinator per second", _series(full, lambda r: r["messages_per_s"])),
    ]
    height = _HEIGHT + _LEGEND_ROW * max(p.count("<rect") for p in panels) + 10
    body = "".join(f'<g transform="translate({i * _WIDTH} 0)">{panel}</g>' for i, panel in enumerate(panels))
    width = len(panels) * _WIDTH
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Simulated clusters of several sizes"><style>{_STYLE}</style>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{body}</svg>'
    )


Series = dict[str, list[tuple[float, float]]]


def _series(rows: Sequence[Row], value: Value) -> Series:
    found: Series = {}
    several = {name: len({r[name] for r in rows}) > 1 for name in ("shape", "sigma", "failures", "mode")}
    for row in rows:
        parts = [row["shape"]] if several["shape"] else []
        parts += [f"tail {row['sigma']:g}"] if several["sigma"] else []
        parts += [f"{row['failures']:g} failures an hour"] if several["failures"] else []
        parts += [row["mode"]] if several["mode"] else []
        number = value(row)
        if number is not None:
            found.setdefault(", ".join(parts) or row["mode"], []).append((log2(row["gpus"]), number))
    return {name: sorted(points) for name, points in found.items()}


def _panel(title: str, series: Series, bands: Series | None = None) -> str:
    """`bands`: by the same names, drawn wide below the lines, so that both are seen where they meet."""
    bands = bands or {}
    points = [p for line in (*series.values(), *bands.values()) for p in line]
    if not points:
        return ""
    xs = sorted({x for x, _ in points})
    top = 1.08 * max(y for _, y in points)
    frame = Frame(_WIDTH, _HEIGHT, (xs[0] - 0.3, xs[-1] + 0.3), (0.0, top or 1.0), top=40)
    frame.text(8, 18, title, "head")
    frame.y_axis("", whole=top > 8)
    bottom = _HEIGHT - frame.bottom
    for x in xs:
        frame.text(frame.px(x), bottom + 16, fmt(2**x, 0), "t", "middle")
    frame.text(_WIDTH - frame.right, _HEIGHT - 5, "GPUs", "t unit", "end")
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(series)}
    for name, line in bands.items():
        frame.add(f'<path d="{path_of(frame, line)}" class="band" stroke="{colours[name]}"/>')
    for i, (name, line) in enumerate(series.items()):
        _line(frame, name, line, colours[name], _HEIGHT + 10 + _LEGEND_ROW * i)
    return "".join(frame.parts)


def _line(frame: Frame, name: str, points: Sequence[tuple[float, float]], colour: str, legend_y: float) -> None:
    frame.add(f'<path d="{path_of(frame, points)}" class="line" stroke="{colour}"/>')
    for x, y in points:
        tip = f"{name}, {fmt(2**x, 0)} GPUs: {fmt(y)}"
        place = f'cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}"'
        frame.add(f'<circle {place} r="3.4" fill="{colour}"><title>{esc(tip)}</title></circle>')
    frame.add(f'<rect x="44" y="{legend_y - 4}" width="18" height="3" fill="{colour}"/>')
    frame.text(68, legend_y + 1, name)
