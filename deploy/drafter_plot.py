"""The picture of `longtail drafter eval`: acceptance by position and expected speed-up by batch size, side by side, a
pair of panels for each temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.drafter_eval import Evaluation, Reached, Speed
from services.report.svg import Frame, esc, fmt, path_of, text_width

_COLOURS = ("#3c6fb4", "#e0912f", "#3f9c6b", "#b0508f", "#7a6ad0", "#8a8f3c")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#5c636e}.grid{stroke:#ecedea}.base{stroke:#c9cbc7}"
    ".line{fill:none;stroke-width:2.2}.one{stroke:#9aa0a8;stroke-dasharray:4 4}.head{font-weight:600;fill:#30353d}"
)
WIDTH, PANEL, LEGEND, NOTE = 960, 300, 40, 34


def draw(found: Evaluation) -> str:
    """A stand-alone SVG."""
    names = list(dict.fromkeys(r.drafter for r in found.reached))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    temperatures = sorted({r.temperature for r in found.reached})
    height = LEGEND + PANEL * len(temperatures) + NOTE
    parts = [f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *_legend(colours)]
    top = max((s.speedup for s in found.speeds), default=1.0)
    for i, temperature in enumerate(temperatures):
        at = LEGEND + PANEL * i
        reached = [r for r in found.reached if r.temperature == temperature]
        speeds = [s for s in found.speeds if s.temperature == temperature]
        depth = max((len(r.rates) for r in found.reached), default=1)
        parts.append(_moved(0, at, _positions(reached, depth, colours, temperature)))
        parts.append(_moved(WIDTH / 2, at, _speeds(speeds, top, colours, temperature)))
    note = f"{found.prompts} held-out prompts, {found.responses} responses; costs: {found.costs}"
    parts.append(f'<text x="14" y="{height - 12}">{esc(note)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    label = "Acceptance by position and expected speed-up by batch size"
    return f'{head} aria-label="{label}"><style>{_STYLE}</style>{"".join(parts)}</svg>'


def _moved(x: float, y: float, frame: Frame) -> str:
    return f'<g transform="translate({x:.0f} {y:.0f})">{"".join(frame.parts)}</g>'


def _legend(colours: dict[str, str]) -> Iterator[str]:
    x = 14.0
    for name, colour in colours.items():
        yield f'<rect x="{x:.0f}" y="17" width="18" height="4" fill="{colour}"/>'
        yield f'<text x="{x + 24:.0f}" y="23">{esc(name)}</text>'
        x += 48 + text_width(name) * 1.15


def _frame(x: tuple[float, float], y: tuple[float, float], title: str) -> Frame:
    frame = Frame(WIDTH // 2, PANEL, x, y, top=52)
    frame.text(14, 16, title, "head")
    return frame


def _positions(reached: Sequence[Reached], depth: int, colours: dict[str, str], temperature: float) -> Frame:
    frame = _frame((1.0, float(max(2, depth))), (0.0, 1.0), f"temperature {temperature:g}")
    _axis(frame, "share of drafts accepted up to the position")
    frame.x_axis("draft position", whole=True)
    for one in reached:
        points = [(float(k), share) for k, share in enumerate(one.reach, start=1)]
        tip = f"{one.drafter}: acceptance length {fmt(one.acceptance_length)} ({one.how})"
        _line(frame, points, colours[one.drafter], tip)
    return frame


def _speeds(speeds: Sequence[Speed], top: float, colours: dict[str, str], temperature: float) -> Frame:
    batches = sorted({s.running for s in speeds})
    frame = _frame((0.0, float(max(1, len(batches) - 1))), (0.0, max(1.5, top * 1.08)), f"temperature {temperature:g}")
    _axis(frame, "expected speed-up over no drafts")
    base = frame.height - frame.bottom
    frame.line(frame.left, base, frame.width - frame.right, base, "base")
    for i, running in enumerate(batches):
        frame.text(frame.px(i), base + 16, str(running), "t", "middle")
    frame.text(frame.width - frame.right, frame.height - 5, "running requests", "t unit", "end")
    frame.line(frame.left, frame.py(1.0), frame.width - frame.right, frame.py(1.0), "one")
    for name in dict.fromkeys(s.drafter for s in speeds):
        own = [s for s in speeds if s.drafter == name]
        points = [(float(batches.index(s.running)), s.speedup) for s in own]
        told = ", ".join(f"{s.running}: {fmt(s.speedup)} at depth {s.depth}" for s in own)
        _line(frame, points, colours[name], f"{name}, {told}")
    return frame


def _axis(frame: Frame, unit: str) -> None:
    """The unit under the panel's title, which has the place that it usually takes."""
    frame.y_axis("")
    frame.text(14, 36, unit, "t unit")


def _line(frame: Frame, points: Sequence[tuple[float, float]], colour: str, tip: str) -> None:
    path = f'<path d="{path_of(frame, points)}" class="line" stroke="{colour}">'
    frame.add(f"{path}<title>{esc(tip)}</title></path>")
    for x, y in points:
        circle = f'<circle cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="3.6" fill="{colour}">'
        frame.add(f"{circle}<title>{esc(tip)}</title></circle>")
