"""Unfinished requests over time, by mode, and below it which strategy the selector ran, in that strategy's colour."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.tailed_runs import TailRun
from services.report.svg import Frame, path_of

WIDTH, HEIGHT = 900, 340
COLOURS = ("#3c6fb4", "#e0912f", "#58a08b", "#7d62ad", "#c06c84", "#1d7a4f", "#8a8f98")
STYLE = (
    "<style>.t{font:11px sans-serif;fill:#444}.grid{stroke:#e3e4e1}.base{stroke:#999}"
    ".line{fill:none;stroke-width:2}"
    + "".join(f".k{i}{{stroke:{c}}}.t.k{i},rect.k{i}{{fill:{c};stroke:none}}" for i, c in enumerate(COLOURS))
    + "</style>"
)


def draw(runs: Mapping[str, TailRun]) -> str:
    """A whole SVG document."""
    seconds = max(r.seconds for r in runs.values())
    most = max(n for r in runs.values() for _, n, _ in r.timeline)
    frame = Frame(WIDTH, HEIGHT, (0.0, seconds), (0.0, 1.05 * most), bottom=84)
    frame.y_axis("unfinished requests", whole=True)
    frame.x_axis("seconds")
    for i, (mode, run) in enumerate(runs.items()):
        cls = _class(i)
        frame.add(f'<path d="{path_of(frame, [(t, float(n)) for t, n, _ in run.timeline])}" class="line {cls}"/>')
        frame.text(WIDTH - 290, 40 + 15 * i, _legend(mode, run), f"t {cls}")
    _strip(frame, runs)
    drawn = frame.render("unfinished requests over time, by mode")
    size = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    return drawn.replace("<svg ", f"<svg {size} ", 1).replace(">", f">{STYLE}", 1)


def _class(number: int) -> str:
    return f"k{number % len(COLOURS)}"


def _legend(mode: str, run: TailRun) -> str:
    accepted = f", acceptance length {run.acceptance_length:.2f}" if run.acceptance_length else ""
    return f"{mode}  {run.seconds:.2f} s{accepted}"


def _strip(frame: Frame, runs: Mapping[str, TailRun]) -> None:
    """One bar per stretch of rounds with the same strategy."""
    spans = [s for r in runs.values() for s in r.spans]
    names = sorted({s.strategy for s in spans})
    coloured = [*runs, *(name for name in names if name not in runs)]
    top = HEIGHT - 34
    for span in spans:
        cls = _class(coloured.index(span.strategy))
        left, right = frame.px(max(0.0, span.start_s)), frame.px(span.end_s)
        frame.rect(left, top, max(0.5, right - left), 12, f"bar {cls}", f"{span.strategy}: {span.reason}")
    for i, name in enumerate(names):
        frame.text(60 + 150 * i, HEIGHT - 4, name, f"t {_class(coloured.index(name))}")
