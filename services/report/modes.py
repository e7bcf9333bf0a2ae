"""A drawing of one run in several modes: what a mean step takes by phase, and the reward of each step."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from services.report.svg import Frame, esc, fmt, path_of

_PHASES = (("rollout_s", "#3c6fb4"), ("reward_s", "#a3508f"), ("policy_s", "#e0912f"), ("publish_s", "#3f8f5b"))
_COLOURS = ("#5c636e", "#3c6fb4", "#e0912f", "#3f8f5b", "#a3508f", "#c0504d")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#5c636e}.head{font-weight:600;fill:#2b2f36}.grid{stroke:#ecedea}"
    ".base{stroke:#c9cbc7}.line{fill:none;stroke-width:2}"
)
_WIDTH, _HEIGHT = 470, 300


def draw_modes(found: Mapping[str, Any]) -> str:
    """`found` as `longtail bench e2e --json` tells it. A stand-alone SVG."""
    left, right = _bars(found), _rewards(found)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT + 40}" role="img" '
        f'aria-label="One run in several modes of speculation"><style>{_STYLE}</style>'
        f'<rect width="{2 * _WIDTH}" height="{_HEIGHT + 40}" fill="#ffffff"/>{left}'
        f'<g transform="translate({_WIDTH} 0)">{right}</g></svg>'
    )


def _bars(found: Mapping[str, Any]) -> str:
    """Means, whose phases add up to the step, as medians of them do not; and their ratios."""
    modes = {mode: row["mean_step"] for mode, row in found["modes"].items()}
    totals = {mode: sum(row.values()) for mode, row in modes.items()}
    frame = Frame(_WIDTH, _HEIGHT, (0.0, float(len(modes))), (0.0, 1.15 * max(totals.values())), top=40)
    frame.text(8, 18, f"Seconds of a mean step ({found['clock']})", "head")
    frame.y_axis("")
    for i, (mode, row) in enumerate(modes.items()):
        x, width, base = frame.px(i + 0.2), frame.px(0.6) - frame.px(0.0), 0.0
        for phase, colour in _PHASES:
            top = base + row[phase]
            height = frame.py(base) - frame.py(top)
            tip = esc(f"{mode}, {phase}: {fmt(row[phase])}")
            shape = f'x="{x:.1f}" y="{frame.py(top):.1f}" width="{width:.1f}" height="{height:.1f}"'
            frame.add(f'<rect {shape} fill="{colour}"><title>{tip}</title></rect>')
            base = top
        label = f"{fmt(found['speedup_same_steps'].get(mode))} x off"
        frame.text(frame.px(i + 0.5), frame.py(totals[mode]) - 6, label, "t", "middle")
        frame.text(frame.px(i + 0.5), _HEIGHT - frame.bottom + 16, mode, "t", "middle")
    _legend(frame, [(phase.removesuffix("_s"), colour) for phase, colour in _PHASES])
    return "".join(frame.parts)


def _rewards(found: Mapping[str, Any]) -> str:
    curves = {
        # as far as all seeds came
        mode: [mean(values) for values in zip(*row["reward"], strict=False)]
        for mode, row in found["modes"].items()
    }
    values = [v for curve in curves.values() for v in curve]
    steps = max(len(curve) for curve in curves.values())
    frame = Frame(_WIDTH, _HEIGHT, (1.0, float(max(2, steps))), (min(values) - 0.02, max(values) + 0.02), top=40)
    frame.text(8, 18, "Reward of each step, mean over the seeds", "head")
    frame.y_axis("")
    frame.x_axis("step", whole=True)
    colours = [(mode, _COLOURS[i % len(_COLOURS)]) for i, mode in enumerate(curves)]
    for mode, colour in colours:
        path = path_of(frame, [(float(k + 1), v) for k, v in enumerate(curves[mode])])
        frame.add(f'<path d="{path}" class="line" stroke="{colour}"><title>{esc(mode)}</title></path>')
    _legend(frame, colours)
    return "".join(frame.parts)


def _legend(frame: Frame, names: list[tuple[str, str]]) -> None:
    x = 44.0
    for name, colour in names:
        frame.add(f'<rect x="{x:.0f}" y="{_HEIGHT + 14}" width="18" height="4" fill="{colour}"/>')
        frame.text(x + 23, _HEIGHT + 20, name)
        x += 40 + 6.6 * len(name)
