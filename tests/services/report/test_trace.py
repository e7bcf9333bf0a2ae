"""The trace loads in Chrome's and Perfetto's viewers: no overlap within a row, no empty events, whole microseconds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.types import RunEvent, SlotSpan
from services.report.run_folder import RunFolder
from services.report.trace import build_trace, disjoint, natural

times = st.floats(0, 1e5, allow_nan=False)
spans = st.lists(
    st.builds(
        lambda slot, role, a, b: SlotSpan(f"slot {slot}", role, min(a, b), max(a, b)),
        st.integers(0, 3),
        st.sampled_from(["rollout", "idle", "drafting", "lost", "new role"]),
        times,
        times,
    ),
    max_size=30,
)


def complete(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    by_pid: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_pid[event["pid"]].append(event)
    return by_pid


def check(trace: dict[str, Any]) -> None:
    for events in complete(trace).values():
        events.sort(key=lambda e: e["ts"])
        assert all(isinstance(e["ts"], int) and isinstance(e["dur"], int) and e["dur"] > 0 for e in events)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(events))


@given(spans)
def test_spans_of_a_slot_never_overlap_and_nothing_but_overlap_is_lost(given_spans: list[SlotSpan]) -> None:
    kept, cut = disjoint(given_spans)
    for a, b in pairwise(kept):
        assert a.slot != b.slot or a.end_s <= b.start_s
    assert all(s.end_s > s.start_s for s in kept)
    total = sum(s.end_s - s.start_s for s in given_spans)
    assert sum(s.end_s - s.start_s for s in kept) + cut == pytest.approx(total, rel=1e-9, abs=1e-6)
    check(json.loads(json.dumps(build_trace(given_spans, ()), allow_nan=False)))


def test_a_run_s_trace(folder: RunFolder, drive: Callable[..., float]) -> None:
    drive(folder, steps=3, slots=3)
    folder.finish({})
    trace = json.loads((folder.path / "trace.json").read_text())
    check(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["policy", "run", "slot 0", "slot 1", "slot 2"]
    assert set(complete(trace)) == {pid for pid, name in names.items() if name != "run"}
    instants = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    lost = next(e for e in instants if e["name"] == "server_lost")
    assert names[lost["pid"]] == "slot 1" and lost["s"] == "p" and "SIGKILL" in lost["args"]["message"]
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"} == {"acceptance_length", "reward_mean"}


def test_times_become_microseconds_and_events_of_no_slot_are_global() -> None:
    trace = build_trace(
        [SlotSpan("slot 0", "drafting", 1.5, 2.25, "step 1")], [RunEvent(2.0, "drafter_published", "drafter", "v1")]
    )
    (span,) = complete(trace)[1]
    assert (span["ts"], span["dur"], span["name"], span["args"]) == (
        1_500_000,
        750_000,
        "drafting",
        {"label": "step 1"},
    )
    event = next(e for e in trace["traceEvents"] if e["ph"] == "i")
    assert (event["ts"], event["pid"], event["s"]) == (2_000_000, 0, "g")


def test_slots_are_ordered_as_people_count() -> None:
    assert sorted(["slot 10", "slot 2", "policy", "slot 1"], key=natural) == ["policy", "slot 1", "slot 2", "slot 10"]


def test_an_empty_run_has_a_valid_trace(folder: RunFolder) -> None:
    folder.finish({})
    path: Path = folder.path / "trace.json"
    assert complete(json.loads(path.read_text())) == {}
