"""The self-contained page: verdict, key figures, charts, events, warnings, configuration. No script, no assets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.report.bars import phase_figure, strategy_figure
from services.report.energy import energy_section
from services.report.figure import table
from services.report.lengths import length_figure
from services.report.lines import acceptance_figure, reward_figure
from services.report.records import number
from services.report.run_data import RunData
from services.report.strategy_section import strategy_section
from services.report.style import STYLE
from services.report.svg import esc, fmt, fmt_seconds
from services.report.timeline import timeline_figures
from services.report.verdict import Finding, findings, headline, heldout, idle_share, idle_use, offline_pairs

_NONE = "not measured"


@dataclass(frozen=True)
class KeyFigure:
    """One tile: `value` may be (before, after)."""

    label: str
    value: str | tuple[str, str]
    detail: str
    tone: str = ""

    def html(self) -> str:
        if isinstance(self.value, tuple):
            before, after = map(esc, self.value)
            shown = f'{before}<span class="arrow" aria-label="to">\u2192</span>{after}'
        else:
            shown = esc(self.value)
        tone = f" {self.tone}-t" if self.tone else ""
        detail = f'<dd class="d">{esc(self.detail)}</dd>' if self.detail else ""
        return f'<div><dt>{esc(self.label)}</dt><dd class="v{tone}">{shown}</dd>{detail}</div>'


def _signed(change: float, digits: int) -> str:
    return ("+" if change >= 0 else "") + fmt(change, digits)


def _heldout(run: RunData) -> KeyFigure:
    before, after = heldout(run)
    if before is None or after is None:
        return KeyFigure("Held-out reward", fmt(before, 3), _NONE if before is None else "before only")
    return KeyFigure("Held-out reward", (fmt(before, 3), fmt(after, 3)), f"{_signed(after - before, 3)}")


def _acceptance(run: RunData) -> KeyFigure:
    first, last = number(run.summary, "acceptance_length_first"), number(run.summary, "acceptance_length_last")
    measured = [v for v in (number(r, "acceptance_length") for r in run.steps) if v is not None]
    first = first if first is not None or not measured else measured[0]
    last = last if last is not None or not measured else measured[-1]
    frozen = number(run.summary, "acceptance_length_frozen_last")
    pairs = offline_pairs(run.steps)
    frozen = frozen if frozen is not None or not pairs else pairs[-1][1]
    if first is None and last is None:
        return KeyFigure("Acceptance length", fmt(None), "no speculation measured")
    detail = "frozen drafter: " + (_NONE if frozen is None else f"{fmt(frozen)} at the end")
    value = (fmt(first), fmt(last)) if len(run.steps) > 1 else fmt(last)
    return KeyFigure("Acceptance length", value, detail)


def _rollout_seconds(run: RunData) -> KeyFigure:
    off, on = number(run.summary, "rollout_seconds_off"), number(run.summary, "rollout_seconds_on")
    label = "Rollout time, speculation off \u2192 on"
    if not off or not on:
        return KeyFigure(label, fmt(None), _NONE)
    ratio = off / on
    return KeyFigure(
        label, (fmt_seconds(off), fmt_seconds(on)), f"{fmt(ratio)}\u00d7, same prompts and seeds{_repeats(run)}"
    )


def _repeats(run: RunData) -> str:
    repeats = number(run.summary, "compare_repeats")
    return f", median of {fmt(repeats, 0)}" if repeats and repeats > 1 else ""


def _mismatches(run: RunData) -> KeyFigure:
    count = number(run.summary, "greedy_mismatches")
    checked = number(run.summary, "greedy_checked")
    of = f"of {fmt(checked, 0)} responses, " if checked is not None else ""
    detail = _NONE if count is None else f"{of}against plain decoding"
    tone = "" if count is None else ("bad" if count else "good")
    return KeyFigure("Greedy mismatches", fmt(count, 0), detail, tone)


def _idle(run: RunData) -> KeyFigure:
    idle, drafting = idle_use(run)
    share = idle_share(run)
    if idle is None or drafting is None:
        return KeyFigure("Idle time used", fmt(None), _NONE)
    detail = f"{fmt_seconds(drafting)} drafting, {fmt_seconds(idle)} idle, all slots"
    return KeyFigure("Idle time used", "\u2013" if share is None else f"{fmt(100 * share, 0)}\u00a0%", detail)


def _wall(run: RunData) -> KeyFigure:
    rollouts = number(run.summary, "rollouts")
    rollouts = rollouts if rollouts is not None else sum(number(r, "num_rollouts") or 0 for r in run.steps)
    groups = number(run.summary, "groups")
    groups = groups if groups is not None else sum(number(r, "num_groups") or 0 for r in run.steps)
    detail = f"{len(run.steps)} steps, {fmt(groups, 0)} groups, {fmt(rollouts, 0)} rollouts"
    return KeyFigure(f"Wall time ({run.status})", fmt_seconds(run.end_s), detail)


def _header(run: RunData, found: Sequence[Finding]) -> str:
    items = "".join(f'<li class="{f.tone}">{esc(f.text)}</li>' for f in found)
    tiles = (_heldout, _acceptance, _rollout_seconds, _mismatches, _idle, _wall)
    figures = "".join(tile(run).html() for tile in tiles)
    started = f" \u00b7 started {run.started_at.replace('T', ' ').replace('+00:00', ' UTC')}" if run.started_at else ""
    return (
        f'<header><p class="eyebrow">Longtail run {esc(run.run_id)}{esc(started)}</p><h1>{esc(headline(found))}</h1>'
        f'<ul class="findings">{items}</ul><dl class="figures" aria-label="Key figures">{figures}</dl></header>'
    )


def collect_warnings(run: RunData) -> list[tuple[str, str]]:
    """(where, text), equal texts of several steps joined."""
    where: dict[str, list[str]] = {}
    for row in run.steps:
        for text in row.get("warnings") or ():
            where.setdefault(str(text), []).append(str(row.get("step")))
        if errors := number(row, "reward_errors"):
            where.setdefault(f"{fmt(errors, 0)} reward verifier error(s)", []).append(str(row.get("step")))
    out = [(f"step {', '.join(at[:12])}{' and more' if len(at) > 12 else ''}", text) for text, at in where.items()]
    return [("run folder", note) for note in run.notes] + out


def _warnings(run: RunData) -> str:
    rows = collect_warnings(run)
    if not rows:
        return '<p class="none">None.</p>'
    return '<ul class="warnings">' + "".join(f"<li>{esc(text)} ({esc(at)})</li>" for at, text in rows) + "</ul>"


def _events(run: RunData) -> str:
    if not run.events:
        return '<p class="none">None.</p>'
    ordered = sorted(run.events, key=lambda e: e.at_s)
    rows = [[f"{fmt(e.at_s)} s", e.kind, e.subject, e.message] for e in ordered]
    return f'<div class="events">{table(("time", "event", "subject", "message"), rows).html("In order of time")}</div>'


def render_html(run: RunData) -> str:
    """The whole report as one HTML document."""
    slots = "".join(f.html() for f in timeline_figures(run))
    figures = (acceptance_figure, reward_figure, length_figure, phase_figure, strategy_figure)
    charts = "".join(figure(run).html() for figure in figures)
    config = '<p class="none">None.</p>'
    if run.config:
        config = f"<details><summary>Resolved configuration</summary><pre>{esc(run.config)}</pre></details>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Longtail run {esc(run.run_id)}</title><style>{STYLE}</style></head><body><main>"
        f"{_header(run, findings(run))}"
        f'<section aria-label="Slots"><h2>Who used which slot, and when</h2><div class="grid">{slots}</div></section>'
        f'<section aria-label="Measurements"><h2>What was measured</h2><div class="grid">{charts}</div></section>'
        f"{strategy_section(run)}"
        f"{energy_section(run)}"
        f'<section aria-label="Events"><h2>Events</h2><div class="card">{_events(run)}</div></section>'
        f'<section aria-label="Warnings"><h2>Warnings</h2><div class="card">{_warnings(run)}</div></section>'
        f'<section aria-label="Configuration"><h2>Configuration</h2><div class="card">{config}</div></section>'
        "<footer>Drawn by longtail report from the files beside this page; trace.json opens in any Chrome trace viewer."
        "</footer></main></body></html>\n"
    )
