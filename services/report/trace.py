"""The slot timeline in the Chrome trace event format (open it in ui.perfetto.dev or chrome://tracing).

One process per slot with one complete event ("X") per role, process 0 for the run with instant events and counters.
Times are microseconds since the start of the run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from services.core.types import RunEvent, SlotSpan
from services.report.records import Row, number

_COLOURS = {  # reserved colour names of the trace viewers
    "rollout": "thread_state_running",
    "draining": "thread_state_runnable",
    "idle": "grey",
    "drafting": "good",
    "policy": "rail_animation",
    "lost": "terrible",
}


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts slot-2 before slot-10."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", name) if p]


def disjoint(spans: Sequence[SlotSpan]) -> tuple[list[SlotSpan], float]:
    """(spans ordered by slot and start, seconds cut): one slot has one role at a time, so what two clock readings let
    overlap goes to the earlier span, and what is left empty is dropped. Trace viewers garble overlapping events."""
    kept: list[SlotSpan] = []
    cut = 0.0
    for span in sorted(spans, key=lambda s: (natural(s.slot), s.slot, s.start_s, s.end_s)):
        start = span.start_s
        if kept and kept[-1].slot == span.slot and start < kept[-1].end_s:
            cut += min(kept[-1].end_s, span.end_s) - start
            start = kept[-1].end_s
        if span.end_s > start:
            kept.append(SlotSpan(span.slot, span.role, start, span.end_s, span.label))
    return kept, cut


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _span_events(spans: Sequence[SlotSpan], pids: dict[str, int]) -> list[Row]:
    events: list[Row] = []
    for span in spans:
        start, end = _micros(span.start_s), _micros(span.end_s)
        if end <= start:  # shorter than the format's resolution
            continue
        event: Row = {"name": span.role, "cat": "slot", "ph": "X", "ts": start, "dur": end - start}
        event |= {"pid": pids[span.slot], "tid": 1, "args": {"label": span.label} if span.label else {}}
        if span.role in _COLOURS:
            event["cname"] = _COLOURS[span.role]
        events.append(event)
    return events


def _names(pids: dict[str, int]) -> list[Row]:
    named = [("run", 0), *pids.items()]
    rows: list[Row] = []
    for name, pid in named:
        rows.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        rows.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    return rows


def build_trace(spans: Sequence[SlotSpan], events: Sequence[RunEvent], steps: Sequence[Row] = ()) -> dict[str, Any]:
    """The trace as a JSON object; `steps` (lines of metrics.jsonl) become counters."""
    kept, cut = disjoint(spans)
    pids = {slot: i + 1 for i, slot in enumerate(dict.fromkeys(span.slot for span in kept))}
    rows = _names(pids) + _span_events(kept, pids)
    for event in events:
        pid = pids.get(event.subject, 0)
        row: Row = {"name": event.kind, "cat": "event", "ph": "i", "ts": _micros(event.at_s), "pid": pid, "tid": 1}
        rows.append({**row, "s": "p" if pid else "g", "args": {"subject": event.subject, "message": event.message}})
    for step in steps:
        for key in ("acceptance_length", "reward_mean"):
            value, at_s = number(step, key), number(step, "at_s")
            if value is not None and at_s is not None:
                rows.append({"name": key, "ph": "C", "ts": _micros(at_s), "pid": 0, "tid": 0, "args": {key: value}})
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"overlap_cut_s": round(cut, 6)}}
