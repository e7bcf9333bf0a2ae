"""The response-length histogram, with the tail marked and what it cost in time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.report.figure import HALF, Figure, table
from services.report.run_data import RunData, StepTail, quantile
from services.report.svg import Frame, both_sizes, fmt, text_width


def _draw_histogram(width: int, lengths: Sequence[int], label: str) -> str:
    ordered = sorted(lengths)
    p50, p99, top = quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1]
    p90 = quantile(ordered, 0.9)
    bins = 44 if width > 400 else 28
    size = max(1, math.ceil((top + 1) / bins))
    counts = [0] * (top // size + 1)
    for n in ordered:
        counts[n // size] += 1
    frame = Frame(width, 250, (0, max(top + 1, size * len(counts))), (0, max(counts) * 1.06), top=44)
    frame.y_axis("responses", whole=True)
    frame.x_axis("response length, tokens", count=max(3, width // 90))
    base = frame.height - frame.bottom
    for i, count in enumerate(counts):
        if count:
            x, end = frame.px(i * size), frame.px((i + 1) * size)
            y = min(frame.py(count), base - 1.5)
            tip = f"{i * size}\u2013{(i + 1) * size - 1} tokens: {count} responses"
            frame.rect(x + 0.5, y, max(0.8, end - x - 1), base - y, "tail" if (i + 0.5) * size > p90 else "bar", tip)
    _histogram_marks(frame, [("median", p50), ("p99", p99), ("max", float(top))])
    return frame.render(label)


def _histogram_marks(frame: Frame, marks: Sequence[tuple[str, float]]) -> None:
    """Vertical lines with labels; the labels take the free one of two rows."""
    taken = [-1e9, -1e9]
    for name, value in marks:
        x, text = frame.px(value), f"{name} {fmt(value, 0)}"
        half = text_width(text) / 2 + 3
        centre = min(max(x, frame.left + half), frame.width - half)
        row = 0 if taken[0] <= centre - half else 1
        taken[row] = centre + half
        y = 36 - 13 * row
        frame.line(x, y + 4, x, frame.height - frame.bottom, "mark")
        frame.text(centre, y, text, "t mark-t", "middle")


def _row(tail: StepTail) -> list[str]:
    share = None if tail.tail_share is None else 100 * tail.tail_share
    quantiles = (quantile(tail.lengths, 0.5), quantile(tail.lengths, 0.99), max(tail.lengths))
    return [str(tail.step), *(fmt(q, 0) for q in quantiles), fmt(share, 0)]


def length_figure(run: RunData) -> Figure:
    """Response lengths of all training rollouts, with the tail marked and what it cost."""
    title = "Response lengths"
    lengths = [n for tail in run.tails for n in tail.lengths]
    if not lengths:
        return Figure("lengths", title, "", "")
    p50, p90, p99 = (quantile(lengths, q) for q in (0.5, 0.9, 0.99))
    tail_tokens = sum(n for n in lengths if n > p90) / max(1, sum(lengths))
    shares = [t.tail_share for t in run.tails if t.tail_share is not None]
    caption = (
        f"{fmt(len(lengths), 0)} responses. The longest tenth holds {fmt(100 * tail_tokens, 0)}\u00a0% of the tokens."
    )
    if shares:
        share = fmt(100 * quantile(shares, 0.5), 0)
        caption += f" In the median step, {share}\u00a0% of the rollout time passes after 90\u00a0% have finished."
    if truncated := sum(t.truncated for t in run.tails):
        caption += f" {fmt(truncated, 0)} hit the length limit."
    label = f"Histogram of response lengths: median {fmt(p50, 0)}, p99 {fmt(p99, 0)}, maximum {max(lengths)} tokens"
    svg = both_sizes(lambda w: _draw_histogram(w, lengths, label), HALF)
    rows = [_row(t) for t in run.tails]
    legend = (("bar", "up to p90"), ("tail", "longest tenth"))
    return Figure(
        "lengths", title, caption, svg, legend, table(("step", "median", "p99", "max", "tail, % of time"), rows)
    )
