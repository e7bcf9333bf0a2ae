"""The few drawing primitives the charts share: escaping, number formats, ticks, scales and an SVG frame with axes.

Colours are CSS classes (`services.report.style`), so that one drawing serves light and dark.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Control characters are no text, and direction overrides could disguise it.
_UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CHAR = 6.1  # mean width of a character at 11 px, for placing labels


def esc(value: object) -> str:
    """Text for HTML and SVG, in element and attribute position."""
    return html.escape(_UNSAFE.sub("\ufffd", str(value)), quote=True)


def fmt(value: float | None, digits: int = 2) -> str:
    """A number for people: grouped thousands, a real minus sign, an en dash for what was not measured."""
    if value is None or not math.isfinite(value):
        return "\u2013"
    text = f"{value:,.{digits}f}" if abs(value) < 1e7 else f"{value:.3g}"
    return text.replace("-", "\u2212").replace(",", "\u202f")


def fmt_seconds(value: float | None) -> str:
    """ "0.42 s", "12.3 s", "4 min 05 s", "1 h 02 min"."""
    if value is None or not math.isfinite(value):
        return "\u2013"
    if value < 100:
        return f"{value:.{2 if value < 10 else 1}f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def text_width(text: str) -> float:
    return _CHAR * len(text)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_label(value: float, step: float) -> str:
    digits = 0 if step >= 1 and float(step).is_integer() else max(1, -math.floor(math.log10(step) + 1e-9))
    if step * 10**digits % 1 > 1e-6 and digits < 6:
        digits += 1
    return fmt(0.0 if value == 0 else value, digits)


@dataclass
class Frame:
    """One SVG with a plot area and linear scales; `x` and `y` are data ranges. Pixel sizes are at scale 1."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    left: float = 44
    right: float = 14
    top: float = 26
    bottom: float = 38
    parts: list[str] = field(default_factory=list)

    def px(self, value: float) -> float:
        low, high = self.x
        return self.left + (value - low) / ((high - low) or 1.0) * (self.width - self.left - self.right)

    def py(self, value: float) -> float:
        low, high = self.y
        return (
            self.height - self.bottom - (value - low) / ((high - low) or 1.0) * (self.height - self.top - self.bottom)
        )

    def add(self, part: str) -> None:
        self.parts.append(part)

    def text(self, x: float, y: float, text: str, cls: str = "t", anchor: str = "start") -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" class="{cls}" text-anchor="{anchor}">{esc(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str) -> None:
        self.add(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{cls}"/>')

    def rect(self, x: float, y: float, w: float, h: float, cls: str, tip: str = "") -> None:
        shape = f'<rect x="{x:.2f}" y="{y:.1f}" width="{w:.2f}" height="{h:.1f}" class="{cls}"'
        self.add(f"{shape}><title>{esc(tip)}</title></rect>" if tip else f"{shape}/>")

    def dot(self, x: float, y: float, r: float, cls: str, tip: str = "") -> None:
        self.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" class="{cls}"><title>{esc(tip)}</title></circle>')

    def y_axis(self, unit: str, count: int = 4, whole: bool = False) -> None:
        """Horizontal grid lines with labels, the unit written above the axis; `whole` keeps to integers."""
        values = [v for v in ticks(*self.y, count) if not whole or float(v).is_integer()]
        step = values[1] - values[0] if len(values) > 1 else 1.0
        for value in values:
            y = self.py(value)
            self.line(self.left, y, self.width - self.right, y, "base" if value == self.y[0] else "grid")
            self.text(self.left - 7, y + 3.8, tick_label(value, step), "t", "end")
        self.text(2, 12, unit, "t unit")

    def x_axis(self, unit: str, count: int = 6, whole: bool = False) -> None:
        """Tick labels under the plot, the unit below them at the right; `whole` keeps to integers."""
        bottom = self.height - self.bottom
        self.line(self.left, bottom, self.width - self.right, bottom, "base")
        values = ticks(*self.x, count)
        if whole:
            values = sorted({float(round(v)) for v in values if self.x[0] <= round(v) <= self.x[1]})
        step = values[1] - values[0] if len(values) > 1 else 1.0
        for value in values:
            self.text(self.px(value), bottom + 16, tick_label(value, step), "t", "middle")
        self.text(self.width - self.right, self.height - 5, unit, "t unit", "end")

    def render(self, label: str) -> str:
        body = "".join(self.parts)
        view = f"0 0 {self.width} {self.height}"
        return f'<svg viewBox="{view}" role="img" aria-label="{esc(label)}">{body}</svg>'


def path_of(frame: Frame, points: Sequence[tuple[float, float | None]]) -> str:
    """The "d" of a line through `points`, interrupted where a value is missing."""
    out: list[str] = []
    pen_down = False
    for x, y in points:
        if y is None or not math.isfinite(y):
            pen_down = False
            continue
        out.append(f"{'L' if pen_down else 'M'}{frame.px(x):.1f} {frame.py(y):.1f}")
        pen_down = True
    return "".join(out)


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions close to `wanted`, at least `gap` apart where that fits, inside [low, high], in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    at = low - gap
    for i in order:
        at = max(wanted[i], at + gap)
        placed[i] = at
    overflow = at - high
    limit = high
    for i in reversed(order):
        if overflow > 0:
            placed[i] = min(placed[i], limit)
            limit = placed[i] - gap
    return placed


def both_sizes(draw: Callable[[int], str], wide: int, narrow: int = 344) -> str:
    """A drawing for wide and one for narrow screens (CSS shows one): text keeps its size instead of shrinking."""
    return f'<div class="w">{draw(wide)}</div><div class="n">{draw(narrow)}</div>'
