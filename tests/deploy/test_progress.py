"""The live display: a panel on a terminal, one plain line per step elsewhere, never markup from a message."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from deploy.progress import ProgressDisplay, plain_line, render
from services.core.types import ProgressView, RunEvent

VIEW = ProgressView(
    phase="rollout",
    step=3,
    num_steps=20,
    rollouts_done=41,
    rollouts_total=128,
    rollouts_running=23,
    tokens_per_s=1234.6,
    acceptance_length=2.31,
    reward_mean=0.41,
    heldout_reward=None,
    policy_version=2,
    drafter_version=1,
    slots={"slot 0": "rollout", "slot 1": "drafting", "slot 2": "lost", "slot 3": "a new role"},
    events=(RunEvent(3.2, "slot_lost", "slot 2", "[red]died[/red] of [/nonsense]"),),
)


def shown(view: ProgressView | None, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(view))
    return out.getvalue()


@pytest.mark.parametrize("width", [30, 60, 120])
def test_panel_fits_and_shows_everything(width: int) -> None:
    text = shown(VIEW, width)
    assert all(len(line) <= width for line in text.splitlines())
    wanted = ["step 3/20", "41/128", "1,235", "2.31", "0.410", "drafting", "slot 1", "lost", "a new role"]
    assert all(word in text for word in wanted), text
    if width == 120:
        assert "[red]died[/red] of [/nonsense]" in text and "policy 2, drafter 1" in text


def test_panel_before_the_first_view_and_with_zero_totals() -> None:
    assert "starting" in shown(None, 60)
    shown(replace(VIEW, rollouts_total=0, num_steps=0, slots={}, events=()), 60)
    many = shown(replace(VIEW, slots={f"slot {i}": "rollout" for i in range(64)}), 80)
    assert "64 slots" in many


def test_without_a_terminal_one_line_per_step() -> None:
    out = io.StringIO()
    views: list[ProgressView | None] = [None, None]
    views += [replace(VIEW, step=s, rollouts_done=d) for s in (1, 2, 3) for d in (0, 40, 128)]
    feed = iter(views)
    latest: list[ProgressView | None] = [None]
    display = ProgressDisplay(lambda: latest[0], Console(file=out, width=40))
    for latest[0] in feed:
        display.look()
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/20", "step 2/20"]
    assert all("rollouts 128/128" in line for line in out.getvalue().splitlines()), "the step's last view is shown"


def test_without_a_terminal_the_last_step_is_printed_at_the_end_once() -> None:
    out = io.StringIO()
    with ProgressDisplay(lambda: VIEW, Console(file=out, width=40)):
        time.sleep(0.6)
    assert out.getvalue().splitlines() == [plain_line(VIEW)]


def test_on_a_terminal_the_panel_is_live_and_leaves_at_an_error() -> None:
    out = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        ProgressDisplay(lambda: VIEW, Console(file=out, force_terminal=True, width=100)),
    ):
        raise KeyboardInterrupt
    assert "step 3/20" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue(), "the cursor is shown again"
