"""Strategies over time: per slot a strip in the strategy's colour, and above it how many requests ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.core.types import StrategySpan
from services.report.svg import Frame, fmt, fmt_seconds, path_of
from services.report.trace import natural

_ROW, _CURVE, _STRIP = 66, 36, 14
_TOP = 16
_EXACT = 300  # spans per drawing up to which each gets its own bar and tooltip
Bar = tuple[float, float, StrategySpan]


def draw_strip(
    spans: Sequence[StrategySpan], colours: Mapping[str, str], window: tuple[float, float], width: int, label: str
) -> str:
    """`colours`: CSS classes by strategy. `window`: seconds since the start of the run."""
    inside = [s for s in spans if s.end_s > window[0] and s.start_s < window[1]]
    slots = sorted({s.slot for s in spans}, key=natural)
    left = 40 + 6.4 * max((min(len(s), 18) for s in slots), default=0)
    frame = Frame(width, _TOP + _ROW * len(slots) + 38, window, (0, 1), left=left, right=10)
    most = max((max(s.running_first, s.running_last) for s in inside), default=1)
    for i, slot in enumerate(slots):
        _draw_slot(frame, slot, [s for s in inside if s.slot == slot], colours, _TOP + _ROW * i, most)
    frame.text(2, 10, "running requests, and strategy", "t unit")
    frame.x_axis("seconds since the start", count=max(3, width // 140))
    return frame.render(label)


def _draw_slot(
    frame: Frame, slot: str, spans: Sequence[StrategySpan], colours: Mapping[str, str], top: float, most: int
) -> None:
    base, width = top + _CURVE + 4, frame.width - frame.left - frame.right
    frame.text(2, base + _STRIP - 3, slot if len(slot) <= 18 else f"{slot[:17]}\u2026", "t strong")
    frame.text(frame.left - 6, top + 8, fmt(most, 0), "t", "end")
    frame.line(frame.left, top + 4, frame.left + width, top + 4, "grid")
    frame.line(frame.left, base - 2, frame.left + width, base - 2, "base")
    frame.rect(frame.left, base, width, _STRIP, "track")
    exact = len(spans) <= _EXACT
    curve = running_curve(spans) if exact else _columns_curve(frame, spans)
    high = _Height(frame, base - 2, _CURVE - 4, most)
    frame.add(f'<path d="{path_of(high, curve)}" class="line over running"/>')
    if exact:
        for start, end, span in bars(spans):
            _draw_bar(frame, start, end, span, base, colours)
        return
    for cls, path in _column_paths(frame, spans, colours, base).items():
        frame.add(f'<path d="{path}" class="{cls}"/>')


class _Height(Frame):
    """The frame's x axis with a y axis from 0 to `most` that ends at `base` and is `height` high."""

    def __init__(self, frame: Frame, base: float, height: float, most: int) -> None:
        super().__init__(frame.width, frame.height, frame.x, (0, most), frame.left, frame.right)
        self._base, self._tall = base, height

    def py(self, value: float) -> float:
        return self._base - value / (self.y[1] or 1) * self._tall


def bars(spans: Sequence[StrategySpan]) -> list[Bar]:
    """(from, to) of each span's bar, long ones first. Where spans of several kinds overlap, nobody knows any more which
    ran when in between: there a bar is as long as its rounds took."""
    ordered = sorted(spans, key=lambda s: (s.start_s, s.end_s))
    out: list[Bar] = []
    reached = float("-inf")
    for i, span in enumerate(ordered):
        later = i + 1 < len(ordered) and ordered[i + 1].start_s < span.end_s - 1e-9
        shared = later or span.start_s < reached - 1e-9
        end = min(span.end_s, span.start_s + span.rounds_s) if shared else span.end_s
        out.append((span.start_s, end, span))
        reached = max(reached, span.end_s)
    return sorted(out, key=lambda bar: bar[0] - bar[1])


def running_curve(spans: Sequence[StrategySpan]) -> list[tuple[float, float | None]]:
    """Points of the line, interrupted between phases."""
    points: list[tuple[float, float | None]] = []
    before: StrategySpan | None = None
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        if before is not None and before.label != span.label:
            points.append((span.start_s, None))
        if before is None or span.start_s >= before.end_s - 1e-9 or before.label != span.label:
            points += [(span.start_s, float(span.running_first)), (span.end_s, float(span.running_last))]
            before = span
    return points


def _draw_bar(frame: Frame, start: float, end: float, span: StrategySpan, y: float, colours: Mapping[str, str]) -> None:
    start, end = max(start, frame.x[0]), min(end, frame.x[1])
    if end <= start:
        return
    running = f"{span.running_first}\u2192{span.running_last}"
    expected = f", expected {fmt(span.expected, 0)}, OFF {fmt(span.expected_off, 0)}" if span.predicted else ""
    tip = (
        f"{span.slot}, {span.label}: {span.strategy}, {span.reason}; {fmt(span.start_s)}\u2013{fmt(span.end_s)} s, "
        f"{running} running, {span.rounds} rounds in {fmt_seconds(span.rounds_s)}; {fmt(span.tokens_per_s, 0)} "
        f"tokens/s{expected}"
    )
    cls = colours.get(span.strategy, "s5")
    frame.rect(frame.px(start), y, max(0.6, frame.px(end) - frame.px(start)), _STRIP, cls, tip)


def _columns(frame: Frame, spans: Sequence[StrategySpan]) -> list[dict[str, list[float]]]:
    """Per pixel column the seconds and the running requests times seconds of each strategy."""
    low, high = frame.x
    count = int(frame.width - frame.left - frame.right)
    wide = (high - low) / count
    columns: list[dict[str, list[float]]] = [{} for _ in range(count)]
    for span in spans:
        first, last = int(max(0.0, (span.start_s - low) / wide)), int((span.end_s - low) / wide)
        within = range(first, min(last, count - 1) + 1)
        seconds = span.rounds_s / max(1, last - first + 1)
        for at in within:
            sums = columns[at].setdefault(span.strategy, [0.0, 0.0])
            sums[0] += seconds
            sums[1] += seconds * span.verify_steps / span.rounds
    return columns


def _column_paths(frame: Frame, spans: Sequence[StrategySpan], colours: Mapping[str, str], y: float) -> dict[str, str]:
    """One path per class: of every column the strategy that took most of its time."""
    paths: dict[str, list[str]] = {}
    at, columns = 0, _columns(frame, spans)
    tops = [max(c, key=lambda name: c[name][0]) if c else None for c in columns]
    while at < len(tops):
        name, start = tops[at], at
        while at < len(tops) and tops[at] == name:
            at += 1
        if name is not None:
            part = f"M{frame.left + start:.1f} {y:.0f}h{at - start}v{_STRIP}h-{at - start}z"
            paths.setdefault(colours.get(name, "s5"), []).append(part)
    return {cls: "".join(parts) for cls, parts in paths.items()}


def _columns_curve(frame: Frame, spans: Sequence[StrategySpan]) -> list[tuple[float, float | None]]:
    low, high = frame.x
    columns = _columns(frame, spans)
    wide = (high - low) / len(columns)
    points: list[tuple[float, float | None]] = []
    for i, column in enumerate(columns):
        seconds = sum(s for s, _ in column.values())
        points.append((low + (i + 0.5) * wide, sum(r for _, r in column.values()) / seconds if seconds else None))
    return points
