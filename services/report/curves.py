"""Held-out reward of several runs in one drawing: seeds side by side, speculation on against off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.core.errors import DataError
from services.report.records import Row, number, read_lines
from services.report.svg import Frame, esc, fmt, path_of

_COLOURS = {"on": "#3c6fb4", "off": "#e0912f"}
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#5c636e}.grid{stroke:#ecedea}.base{stroke:#c9cbc7}"
    ".line{fill:none;stroke-width:2.2}.faint{stroke-opacity:.35;stroke-width:1.2}"
)


@dataclass(frozen=True)
class Curve:
    """One run. `group` is "on" or "off" (speculation); points are (step, reward)."""

    name: str
    group: str
    heldout: tuple[tuple[float, float], ...]
    training: tuple[tuple[float, float], ...]


def read_curve(run_dir: Path) -> Curve:
    """From metrics.jsonl; which group a run belongs to is read from the strategies its rollouts really used."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        raise DataError(f"{file} is missing: give folders made by `longtail train`")
    rows, _ = read_lines(file)
    steps = [r for r in rows if r.get("kind") == "step"]
    used = {name for r in steps for name in r.get("steps_by_strategy", ())}
    return Curve(
        name=run_dir.name,
        group="off" if used <= {"off"} else "on",
        heldout=_rewards([r for r in rows if r.get("kind") == "evaluation"]),
        training=_rewards(steps),
    )


def _rewards(rows: Sequence[Row]) -> tuple[tuple[float, float], ...]:
    found = ((number(r, "step"), number(r, "reward_mean")) for r in rows)
    return tuple((step, reward) for step, reward in found if step is not None and reward is not None)


def draw_curves(curves: Sequence[Curve]) -> str:
    """A stand-alone SVG: bold lines held-out reward, faint ones the mean reward of each training step."""
    points = [p for c in curves for p in (*c.heldout, *c.training)]
    if not points:
        raise DataError("none of these runs has a finished step yet")
    last, low, high = max(x for x, _ in points), min(y for _, y in points), max(y for _, y in points)
    frame = Frame(900, 380, (0.0, last), (low - 0.03, high + 0.03), right=60)
    frame.add('<rect width="900" height="380" fill="#ffffff"/>')
    frame.y_axis("mean reward (share of right answers)")
    frame.x_axis("step", whole=True)
    for curve in curves:
        colour = _COLOURS[curve.group]
        frame.add(f'<path d="{path_of(frame, curve.training)}" class="line faint" stroke="{colour}"/>')
    for curve in (c for c in curves if c.heldout):
        colour = _COLOURS[curve.group]
        tip = f"{curve.name}, held-out {fmt(curve.heldout[0][1], 3)} to {fmt(curve.heldout[-1][1], 3)}"
        path = f'<path d="{path_of(frame, curve.heldout)}" class="line" stroke="{colour}">'
        frame.add(f"{path}<title>{esc(tip)}</title></path>")
        for x, y in curve.heldout:
            frame.add(f'<circle cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="3.4" fill="{colour}"/>')
    for i, (group, colour) in enumerate(_COLOURS.items()):
        frame.add(f'<rect x="640" y="{22 + 18 * i}" width="18" height="3" fill="{colour}"/>')
        frame.text(664, 27 + 18 * i, f"speculation {group} (bold: held-out)")
    svg = frame.render("Reward over steps, several seeds, with and without speculation")
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f"><style>{_STYLE}</style>", 1
    )
