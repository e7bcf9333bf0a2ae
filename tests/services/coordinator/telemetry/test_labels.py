"""Label values are those that the code uses: a new event or phase must get a name of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.telemetry.labels import CAUSES, EVENTS, OTHER, PHASES, STATES, bucket_names
from services.core.types import SlotState

COORDINATOR = Path(__file__).resolve().parents[4] / "services" / "coordinator"


def words(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*words(node.body), *words(node.orelse))


def first_words(*methods: str) -> set[str]:
    """Literal first arguments of calls of these names in the coordinator's code."""
    found: set[str] = set()
    for file in COORDINATOR.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in methods:
                    found |= set(words(node.args[0]))
    return found


def test_every_event_that_is_told_has_its_kind() -> None:
    told = first_words("tell", "_tell")
    assert "slot_lost" in told and told <= set(EVENTS), told - set(EVENTS)
    assert set(EVENTS) - told == {OTHER}, "kinds that nobody tells any more"


def test_every_phase_is_known() -> None:
    entered = {w for w in first_words("enter", "begin") if " " not in w}
    assert {"rollout", "policy"} <= entered <= set(PHASES), entered - set(PHASES)


def test_states_are_numbered_once_and_for_all() -> None:
    assert [s.value for s in STATES] == ["idle", "rollout", "draining", "drafting", "policy", "lost"]
    assert set(STATES) == set(SlotState)


def test_causes_are_those_of_the_buffer() -> None:
    from typing import get_args

    from services.drafter.buffer import Lost

    assert set(CAUSES) == set(get_args(Lost))


@given(st.lists(st.integers(2, 500), unique=True, max_size=5))
def test_buckets_cover_every_number_of_requests_once(more: list[int]) -> None:
    starts = (1, *sorted(more))
    names = bucket_names(starts)
    assert len(names) == len(starts) and names[-1] == f"{starts[-1]}+"
    covered = [n for name in names[:-1] for n in range(int(name.split("-")[0]), int(name.split("-")[1]) + 1)]
    assert covered == list(range(1, starts[-1]))
