"""The slot timeline: who used which GPU slot when, for the whole run and for one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.core.types import RunEvent, SlotSpan, SlotState
from services.report.figure import Figure, table
from services.report.records import number
from services.report.run_data import RunData, StepTail
from services.report.style import STYLE
from services.report.svg import Frame, both_sizes, esc, fmt, fmt_seconds
from services.report.trace import natural

ROLES = (*(state.value for state in SlotState), "reward")  # reward workers hold no slot, but have a row
_ROW, _BAR = 30, 20
_BAD = ("lost", "gone", "mismatch", "failed")  # endings of event kinds that deserve a red mark
_EXACT = 300  # spans per drawing up to which each gets its own bar and tooltip


def _cls(role: str) -> str:
    return f"r-{role}" if role in ROLES else "r-other"


def _slots(spans: Sequence[SlotSpan]) -> list[str]:
    """GPU slots first, then the rows of services that hold no slot."""
    return sorted({s.slot for s in spans}, key=lambda name: (not name.startswith("slot"), natural(name)))


def _merged(frame: Frame, spans: Sequence[SlotSpan]) -> list[SlotSpan]:
    """Neighbours of one role joined across gaps no eye can see."""
    out: list[SlotSpan] = []
    for span in spans:
        last = out[-1] if out else None
        if last and last.role == span.role and frame.px(span.start_s) - frame.px(last.end_s) < 0.4:
            out[-1] = SlotSpan(last.slot, last.role, last.start_s, span.end_s)
        else:
            out.append(span)
    return out


def _draw_row(frame: Frame, spans: Sequence[SlotSpan], y: float, exact: bool) -> None:
    """Bars of one slot: with tooltips, or as one path per role when there are very many."""
    paths: dict[str, list[str]] = {}
    for span in spans if exact else _merged(frame, spans):
        start, end = max(span.start_s, frame.x[0]), min(span.end_s, frame.x[1])
        if end <= start:
            continue
        x, width = frame.px(start), max(0.6, frame.px(end) - frame.px(start))
        if exact:
            took = fmt_seconds(span.end_s - span.start_s)
            tip = f"{span.slot}: {span.role} {fmt(span.start_s)}\u2013{fmt(span.end_s)} s ({took})"
            frame.rect(x, y, width, _BAR, _cls(span.role), f"{tip} {span.label}".strip())
        else:
            paths.setdefault(_cls(span.role), []).append(f"M{x:.1f} {y:.0f}h{width:.1f}v{_BAR}h-{width:.1f}z")
    for cls, parts in paths.items():
        frame.add(f'<path d="{"".join(parts)}" class="{cls}"/>')


def _draw_rows(frame: Frame, slots: Sequence[str], spans: Sequence[SlotSpan], left: float, width: int) -> None:
    """Every slot's name, track and bars, from `left` on."""
    for i, slot in enumerate(slots):
        y = 26 + _ROW * i + (_ROW - _BAR) / 2
        short = slot if len(slot) <= 18 else slot[:17] + "\u2026"
        frame.text(left - 8, y + _BAR / 2 + 4, short, "t strong", "end")
        frame.rect(left, y, width - left - 10, _BAR, "track")
        _draw_row(frame, [s for s in spans if s.slot == slot], y, len(spans) <= _EXACT)


def draw_timeline(spans: Sequence[SlotSpan], width: int = 1160) -> str:
    """A stand-alone SVG of spans, from the first one's start to the last one's end, with its legend."""
    slots, row = _slots(spans), 30
    start, end = min(s.start_s for s in spans), max(s.end_s for s in spans)
    height = 26 + _ROW * len(slots) + 38
    frame = Frame(width, height + row, (0.0, end - start), (0, 1), left=70, right=10, bottom=28 + row)
    frame.add(f'<rect width="{width}" height="{height + row}" fill="#ffffff"/>')
    shifted = [replace(s, start_s=s.start_s - start, end_s=s.end_s - start) for s in spans]
    _draw_rows(frame, slots, shifted, 70, width)
    frame.x_axis("seconds", count=8)
    used = [role for role in ROLES if role in {s.role for s in spans}]
    for i, role in enumerate(used):
        frame.rect(70 + 110 * i, height + 6, 12, 12, _cls(role))
        frame.text(88 + 110 * i, height + 16, role)
    svg = frame.render("Roles of every slot")
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f"><style>{STYLE}</style>", 1
    )


def _draw_events(frame: Frame, events: Sequence[RunEvent]) -> None:
    """A tick above the rows for each event; losses get a red line through all rows."""
    for event in events:
        if not frame.x[0] <= event.at_s <= frame.x[1]:
            continue
        x, bad = frame.px(event.at_s), event.kind.endswith(_BAD)
        tip = f"{fmt(event.at_s)} s {event.kind} {event.subject}: {event.message}"
        cls = "ev bad" if bad else "ev"
        if bad:
            frame.line(x, 22, x, frame.height - frame.bottom, "evline")
        frame.add(f'<path d="M{x - 4:.1f} 14h8l-4 7z" class="{cls}"><title>{esc(tip)}</title></path>')


def _draw(run: RunData, window: tuple[float, float], width: int, marks: Sequence[tuple[float, str]], label: str) -> str:
    slots = _slots(run.spans)
    left = 12 + 6.4 * max((min(len(s), 18) for s in slots), default=0)
    height = 26 + _ROW * len(slots) + 38
    frame = Frame(width, height, window, (0, 1), left=left, right=10)
    inside = [s for s in run.spans if s.end_s > window[0] and s.start_s < window[1]]
    _draw_rows(frame, slots, inside, left, width)
    for at_s, text in marks:
        x = frame.px(at_s)
        frame.line(x, 22, x, height - frame.bottom, "mark")
        late = x > width * 0.6
        frame.text(x + (-4 if late else 4), 12, text, "t mark-t", "end" if late else "start")
    _draw_events(frame, run.events)
    frame.x_axis("seconds since the start", count=max(3, width // 140))
    return frame.render(label)


def longest_tail(run: RunData) -> StepTail | None:
    """The step whose last responses kept the others waiting longest, as a share of its rollout window."""
    known = [t for t in run.tails if t.tail_share is not None]
    return max(known, key=lambda t: t.tail_share or 0.0, default=None)


def step_window(run: RunData, step: int) -> tuple[float, float] | None:
    """(start, end) of one step in run seconds: from its first generating span, or what its phases add up to, to the
    writing of its line."""
    row = next((r for r in run.steps if r.get("step") == step), None)
    end = number(row, "at_s") if row else None
    if row is None or end is None:
        return None
    earlier = [at_s for r in run.steps if r is not row and (at_s := number(r, "at_s")) is not None and at_s < end]
    generating = [s.start_s for s in run.spans if s.role == SlotState.ROLLOUT.value and s.label == f"step {step}"]
    phases = sum(number(row, f"{phase}_s") or 0.0 for phase in ("rollout", "reward", "policy", "publish"))
    start = max(0.0, min(generating, default=end - 1.02 * phases), *earlier)
    return (start, end) if end > start else None


def _seconds_table(run: RunData) -> list[list[str]]:
    totals: dict[str, dict[str, float]] = {slot: {} for slot in _slots(run.spans)}
    for span in run.spans:
        of = totals[span.slot]
        of[span.role] = of.get(span.role, 0.0) + span.end_s - span.start_s
    return [[slot, *(fmt(of.get(role, 0.0)) for role in ROLES)] for slot, of in totals.items()]


def timeline_figures(run: RunData) -> list[Figure]:
    """Whole run, and the step with the longest tail when its rollouts and times are known."""
    used = {s.role for s in run.spans}
    legend = tuple((_cls(role), role) for role in ROLES if role in used)
    if used - set(ROLES):
        legend += (("r-other", "other"),)
    if run.events:
        legend += (("ev-sw", "event"),)
    if not run.spans:
        return [Figure("timeline", "Slot timeline", "", "", full_width=True)]
    window = (0.0, max(run.end_s, *(s.end_s for s in run.spans)))
    svg = both_sizes(lambda w: _draw(run, window, w, (), "Roles of every slot over the whole run"), 1160)
    caption = "A row is one GPU slot, or a service that holds none; the colour is the role that held the slot's lease."
    seconds = table(("slot", *(f"{r}, s" for r in ROLES)), _seconds_table(run))
    figures = [Figure("timeline", "Slot timeline, whole run", caption, svg, legend, seconds, full_width=True)]
    tail = longest_tail(run)
    zoom = step_window(run, tail.step) if tail else None
    if tail and zoom and any(s.end_s > zoom[0] and s.start_s < zoom[1] for s in run.spans):
        figures.append(_zoom_figure(run, tail, zoom, legend))
    return figures


def _tail_start(run: RunData, tail: StepTail, window: tuple[float, float]) -> float | None:
    """When 90 % of a step's responses were done, in run seconds. Servers stamp rollouts with clocks of their own, so
    count back from the end of the last generating span."""
    generating = (SlotState.ROLLOUT.value, SlotState.DRAINING.value)
    ends = [s.end_s for s in run.spans if s.role in generating and window[0] < s.end_s <= window[1]]
    at_s = max(ends) - tail.tail_s if ends and tail.tail_s is not None else None
    return at_s if at_s is not None and at_s > window[0] else None


def _zoom_figure(
    run: RunData, tail: StepTail, window: tuple[float, float], legend: tuple[tuple[str, str], ...]
) -> Figure:
    at_s = _tail_start(run, tail, window)
    marks = [] if at_s is None else [(at_s, "90\u00a0% of responses done")]
    label = f"Roles of every slot in step {tail.step}"
    svg = both_sizes(lambda w: _draw(run, window, w, marks, label), 1160)
    caption = (
        f"In step {tail.step}, {fmt(100 * (tail.tail_share or 0), 0)}\u00a0% of the rollout time went by waiting "
        "for the last 10\u00a0% of the responses, the largest share of any step."
    )
    return Figure("zoom", f"Step {tail.step}: the longest tail", caption, svg, legend, full_width=True)
