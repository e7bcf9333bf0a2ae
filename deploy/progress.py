"""The live display of a run: a panel that redraws itself on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.core.types import ProgressView

_REFRESH_PER_S = 4
_POLL_S = 0.25  # how often the plain display looks for a finished step
_STYLES = {
    "rollout": "blue",
    "draining": "cyan",
    "idle": "bright_black",
    "drafting": "yellow",
    "policy": "magenta",
    "lost": "bold red",
}


def _number(value: float | None, digits: int = 2) -> str:
    return "\u2013" if value is None else f"{value:.{digits}f}"


def _heading(view: ProgressView) -> Text:
    step = f"step {min(view.step, view.num_steps)}/{view.num_steps}" if view.num_steps else f"step {view.step}"
    return Text.assemble((view.phase, "bold"), "  ", step)


def _bar(view: ProgressView) -> Table:
    total = max(1, view.rollouts_total)
    row = Table.grid(expand=True)  # a bare ProgressBar ends without a line break
    row.add_row(ProgressBar(total=total, completed=min(view.rollouts_done, total)))
    return row


def _facts(view: ProgressView) -> Table:
    """Two columns of name and value."""
    rollouts = f"{view.rollouts_done}/{view.rollouts_total} done, {view.rollouts_running} running"
    pairs = [
        ("rollouts", rollouts),
        ("tokens/s", f"{view.tokens_per_s:,.0f}"),
        ("acceptance length", _number(view.acceptance_length)),
        ("reward", _number(view.reward_mean, 3)),
        ("held-out reward", _number(view.heldout_reward, 3)),
        ("versions", f"policy {view.policy_version}, drafter {view.drafter_version}"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(name, style="bright_black", no_wrap=True), Text(value, no_wrap=True, overflow="ellipsis"))
    return grid


def _slots(slots: Mapping[str, str]) -> Table:
    """Slots grouped by the role that holds them; names are listed while they are few."""
    by_role: dict[str, list[str]] = {}
    for name, role in slots.items():
        by_role.setdefault(role, []).append(name)
    grid = Table.grid(padding=(0, 2))
    for role in [r for r in _STYLES if r in by_role] + sorted(set(by_role) - set(_STYLES)):
        names = by_role[role]
        shown = ", ".join(names) if len(names) <= 4 else f"{len(names)} slots"
        grid.add_row(Text("\u25a0 " + role, style=_STYLES.get(role, "white"), no_wrap=True), Text(shown))
    return grid


def _events(view: ProgressView) -> Text:
    # Text, never markup: a message with [brackets] is shown as it is.
    lines = [f"{e.at_s:8.1f} s  {e.kind} {e.subject}: {e.message}" for e in view.events[-5:]]
    return Text("\n".join(lines), style="bright_black", overflow="ellipsis", no_wrap=True)


def render(view: ProgressView | None) -> RenderableType:
    """The panel for one view; None before the run has said anything."""
    if view is None:
        return Panel(Text("starting"), title="longtail", border_style="bright_black")
    parts: list[RenderableType] = [
        _heading(view),
        _bar(view),
        Columns([_facts(view), _slots(view.slots)], padding=(0, 5)),
    ]
    if view.events:
        parts.append(_events(view))
    return Panel(Group(*parts), title="longtail", title_align="left", border_style="bright_black")


def plain_line(view: ProgressView) -> str:
    """One line for a log."""
    return (
        f"step {view.step}/{view.num_steps}  {view.phase}  rollouts {view.rollouts_done}/{view.rollouts_total}  "
        f"tokens/s {view.tokens_per_s:.0f}  acceptance length {_number(view.acceptance_length)}  "
        f"reward {_number(view.reward_mean, 3)}  held-out {_number(view.heldout_reward, 3)}  "
        f"policy {view.policy_version}  drafter {view.drafter_version}"
    )


class ProgressDisplay:
    """Context manager around a run. `source` is asked from another thread and must be cheap.

    On a terminal: a live panel. Otherwise: the last view of each step as one line when the next one begins, and of the
    last step at the end.
    """

    def __init__(self, source: Callable[[], ProgressView | None], console: Console | None = None) -> None:
        self._source = source
        self._console = console or Console()
        self._live: Live | None = None
        self._last: ProgressView | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=lambda: render(self._source()),
                console=self._console,
                refresh_per_second=_REFRESH_PER_S,
                vertical_overflow="crop",
            )
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._thread is not None:
            self._stop.set()
            self._thread.join(timeout=5.0)
            self._thread = None
            self.look()
            if self._last is not None:
                self._print(self._last)
                self._last = None

    def look(self) -> None:
        """Take the newest view; print the previous step's last one when a new step has begun."""
        view = self._source()
        if view is None:
            return
        if self._last is not None and view.step != self._last.step:
            self._print(self._last)
        self._last = view

    def _print(self, view: ProgressView) -> None:
        self._console.print(plain_line(view), markup=False, highlight=False, soft_wrap=True)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            self.look()
