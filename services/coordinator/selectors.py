"""What the servers' strategy selectors have learned, kept here so that it outlives a server, and the run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from services.coordinator.assembly import Parts
from services.core.selector import SelectorState


class SelectorStates:
    """By slot, as of the last step's rollouts. A server that knows nothing (its process is new) gets its slot's state
    before its first weights."""

    def __init__(self, parts: Parts) -> None:
        self._fleet, self._calls, self._tell = parts.fleet, parts.calls, parts.tell
        self._timeout_s = parts.config.coordinator.call_timeout_s
        self._states: dict[int, SelectorState] = {}
        parts.fleet.on_new = self._give

    @property
    def known(self) -> tuple[SelectorState | None, ...]:
        """One for each slot; None: its selector learns nothing, or has not told."""
        return tuple(self._states.get(slot) for slot in range(len(self._fleet.servers)))

    def go_on(self, states: Sequence[SelectorState | None]) -> None:
        """From a checkpoint. Slots that there were not are left out."""
        self._states = {slot: state for slot, state in enumerate(states) if state is not None}

    def ask(self, slots: Sequence[int]) -> None:
        """Of servers between two phases. One that is lost meanwhile leaves what it told last."""
        for slot in slots:
            client = self._fleet.client(slot)
            told = partial(self._told, slot)
            self._calls.post(client.name, client.selector_state(), told, lambda reason: None, self._timeout_s)

    def _told(self, slot: int, state: SelectorState | None) -> None:
        if state is not None:
            self._states[slot] = state

    def _give(self, slot: int, epoch: int) -> None:
        state, client = self._states.get(slot), self._fleet.client(slot)
        if state is None:
            return

        def told(fits: bool) -> None:
            message = "the selector goes on with what it had learned"
            if not fits:
                message = "the selector begins anew: what is kept is of another selector, version, device or model"
            self._tell("selector_restored", client.name, message)

        lost = partial(self._fleet.lose, slot)
        self._calls.post(client.name, client.restore_selector(state, epoch), told, lost, self._timeout_s)
