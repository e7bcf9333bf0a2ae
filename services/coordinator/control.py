"""What a person may ask of a running run: pause, resume, checkpoint, stop, and which strategy the selector takes.

    any thread             Control.ask      checks a request, remembers it, says when it is obeyed
    coordinator's thread   SafePoint.reach  between two steps: obeys, tells an event, stays while the run is paused

A request is remembered, not run: in the middle of a step half of its rollouts would be lost. Only `stop` is obeyed
inside a step, at the coordinator's next turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.config.naming import strategy_name
from services.config.schema import ClusterConfig, SGLangEngine
from services.coordinator.calls import Calls
from services.coordinator.fleet import Fleet
from services.coordinator.progress import ProgressBoard
from services.coordinator.timeline import Timeline
from services.core.errors import ControlRefusedError
from services.core.types import ControlState, RunEvent

OFF = "off"
Action = Literal["pause", "resume", "checkpoint", "stop", "selector"]


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """`strategy` belongs to "selector": a strategy's name, or None to give the choice back to the selector."""

    action: Action
    strategy: str | None = None


def forceable(config: ClusterConfig) -> tuple[str, ...]:
    """Names that "selector" takes: what the servers can change to without a restart."""
    names = dict.fromkeys(strategy_name(s) for s in config.speculation.strategies)
    if not isinstance(config.rollout.engine, SGLangEngine):  # an SGLang engine runs one strategy from its start
        names[OFF] = None
    return tuple(names)


class Control:
    """The requests to one run. Every method may be called from any thread. `checkpoints`: whether there is a place
    for them."""

    def __init__(self, strategies: Sequence[str], state: ControlState, checkpoints: bool) -> None:
        self._strategies, self._checkpoints = tuple(strategies), checkpoints
        self._lock = threading.Lock()
        self._state, self._wants_checkpoint, self._ended = state, False, False
        self._stop = threading.Event()

    def ask(self, request: ControlRequest) -> str:
        """Remember it; the answer says when it is obeyed. Raises ControlRefusedError when it cannot be."""
        with self._lock:
            if self._ended:
                raise ControlRefusedError("the run has ended: there is nothing left to control")
            match request.action:
                case "pause":
                    self._state = replace(self._state, paused=True)
                    return "the run pauses when the step under way is done"
                case "resume":
                    was, self._state = self._state.paused, replace(self._state, paused=False)
                    return "the run goes on" if was else "the run was not paused"
                case "stop":
                    self._stop.set()
                    return "the run stops at its next safe point and leaves a valid run folder"
                case "checkpoint":
                    return self._ask_checkpoint()
                case "selector":
                    return self._ask_strategy(request.strategy)

    def stop(self) -> None:
        """Make the run raise StopRequested at its next safe point."""
        self._stop.set()

    def end(self) -> None:
        """The run is over: every request from now on is refused."""
        with self._lock:
            self._ended = True

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def state(self) -> ControlState:
        with self._lock:
            return self._state

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        with self._lock:
            wanted, self._wants_checkpoint = self._wants_checkpoint, False
            return wanted

    def _ask_checkpoint(self) -> str:
        if not self._checkpoints:
            raise ControlRefusedError("this run writes no checkpoints: start it with run.checkpoint_every above 0")
        self._wants_checkpoint = True
        return "a checkpoint is written when the step under way is done"

    def _ask_strategy(self, name: str | None) -> str:
        if name is not None and name not in self._strategies:
            known = ", ".join(self._strategies)
            raise ControlRefusedError(f"strategy {name!r} is none that this run's servers can take: one of {known}")
        self._state = replace(self._state, forced=name)
        word = "the selector chooses" if name is None else f"strategy {name} is used"
        return f"{word} from the next step on"


@dataclass(frozen=True, slots=True)
class SafePoint:
    """Between two steps: every slot is held by its server, which has nothing to do. `write_checkpoint` waits until it
    is written and says where."""

    control: Control
    fleet: Fleet
    calls: Calls
    timeline: Timeline
    board: ProgressBoard
    tell: Callable[[str, str, str], RunEvent]
    write_checkpoint: Callable[[], str]

    def reach(self) -> None:
        """Obey what was asked; returns when the run may go on. Raises StopRequested."""
        if self._obey():
            self.fleet.force(self.control.state.forced)
        if self.control.state.paused:
            self._pause()

    def _obey(self) -> bool:
        """Whether the servers have to be told another strategy."""
        if self.control.take_checkpoint():
            self.tell("checkpoint", "policy", self.write_checkpoint())
        forced = self.control.state.forced
        if forced == self.fleet.forced:
            return False
        self.fleet.forced = forced
        message = "the selector chooses again" if forced is None else f"strategy {forced} on request"
        self.tell("strategy_forced", "selector", message)
        return True

    def _pause(self) -> None:
        """Slots are free meanwhile: no lease has to be renewed, and the timeline shows that nothing was done. Opening
        them again tells servers their strategy."""
        self.timeline.enter("paused")
        self.fleet.release_all()
        self.board.enter("paused")
        self.tell("paused", "coordinator", "on request; nothing is generated or trained until the run is resumed")
        while self.control.state.paused:
            self.calls.turn()
            self._obey()
        self.tell("resumed", "coordinator", "on request")
        self.fleet.open_all()
