"""Which state of the drafter is served: versions go out only when they are better on rollouts nobody has trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from services.coordinator.fleet import Patience, Published
from services.coordinator.trainers import Trainers
from services.core.errors import ServiceLostError
from services.core.protocols import Blob, Clock
from services.core.types import AcceptanceEstimate, RunEvent

_Due = dict[int, int]  # slots that have not answered yet: their trainer's losses until then


class Releases:
    """`frozen` is the state of version 0, kept for comparison; `served` that of the version published last. `gain`:
    what the state that `publish` considered adds to the served one's acceptance length, relative; None when it
    considered none, or nobody measured."""

    def __init__(
        self,
        trainers: Trainers,
        initial: Blob | None,
        clock: Clock,
        patience: Patience,
        tell: Callable[[str, str, str], RunEvent],
        turn: Callable[[], None],
    ) -> None:
        self._trainers = trainers
        self._frozen = self._served = initial
        self._clock = clock
        self._patience = patience
        self._tell = tell
        self._turn = turn
        self._version = 0
        self._asked: Blob | None = None  # the live state that was last asked about
        self._due: _Due = {}  # what a verdict, and what follows from it, waits for
        self._frozen_due: _Due = {}  # nobody decides anything by it
        self._exported: Blob | None = None  # of the state that was asked about, for the rollout servers
        self.gain: float | None = None
        self.estimates: dict[str, AcceptanceEstimate] = {}

    @property
    def served(self) -> Blob | None:
        return self._served

    def go_on(self, version: int, served: Blob | None) -> None:
        """After a takeover or in a resumed run: serve `served` under this version."""
        self._version, self._served = version, served

    def begin_again(self, frozen: Blob | None, live: Blob) -> None:
        """After a loss: `live` becomes the next version, whatever was served."""
        self._frozen, self._asked = frozen, None
        self.go_on(self._version + 1, live)

    def estimate(self, live: Blob | None) -> None:
        """Ask how well the live and the served drafter fit the newest hidden states, before any of it is trained on;
        None in a step without any, of which nothing can be said. Rollout waits for the verdict: each trainer is asked
        about some of them, and nobody twice about the same state. What turns out better is exported at once: mostly the
        policy still trains, or is still being published. The first drafter is asked about behind that."""
        self.estimates, self._asked, self._exported, self.gain = {}, live, None, None
        self._due, self._frozen_due = {}, {}
        newest, up = self._trainers.newest, self._trainers.up
        if newest is None or not up or live is None or self._served is None or self._frozen is None:
            return
        states = {"live": live, "served": self._served, "frozen": self._frozen}
        alike: dict[int, list[str]] = {}  # names of one and the same state
        for name, state in states.items():
            alike.setdefault(id(state), []).append(name)
        frozen = alike.pop(id(self._frozen)) if len(alike[id(self._frozen)]) == 1 else None
        groups, due = list(alike.values()), self._due

        def decided() -> None:
            still_up = self._trainers.up
            if due or not still_up:
                return
            if (self._found_gain() or 0) > 0:
                self._export_beside(still_up[0], live, due)
            if frozen is not None:
                self._ask_about(still_up[-1], [frozen], states, newest, self._frozen_due, lambda: None)

        for place, slot in enumerate(up[: len(groups)]):
            self._ask_about(slot, groups[place :: len(up)], states, newest, due, decided)

    def _ask_about(
        self,
        slot: int,
        groups: Sequence[Sequence[str]],
        states: Mapping[str, Blob],
        newest: Blob,
        due: _Due,
        then: Callable[[], None],
    ) -> None:
        trainers, client = self._trainers, self._trainers.clients[slot]
        asked = {names[0]: states[names[0]] for names in groups}

        def heard(estimates: Sequence[AcceptanceEstimate]) -> None:
            del due[slot]
            for names, estimate in zip(groups, estimates, strict=True):
                self.estimates |= {name: replace(estimate, drafter=name) for name in names}
            then()

        def gone(reason: str) -> None:
            del due[slot]

        def ask() -> None:
            trainers.post(slot, client.estimate(asked, newest), heard, gone)

        due[slot] = trainers.losses[slot]
        trainers.identified(slot, ask)

    def _export_beside(self, slot: int, state: Blob, due: _Due) -> None:
        trainers = self._trainers
        pending, blob = trainers.clients[slot].export(state)

        def exported(_: int) -> None:
            del due[slot]
            self._exported = blob

        def gone(reason: str) -> None:
            del due[slot]

        due[slot] = trainers.losses[slot]
        trainers.post(slot, pending, exported, gone)

    def settle(self) -> None:
        """Wait until whoever was asked because of `estimate` has answered, or is lost."""
        self._wait(self._due)
        self._wait(self._frozen_due)

    def _wait(self, due: _Due) -> None:
        while any(self._trainers.losses[slot] == before for slot, before in due.items()):
            self._turn()

    def publish_first(self) -> Published | None:
        """Export the version that is to be served first; None without drafter trainers."""
        if not self._trainers.clients or self._served is None:
            return None
        give_up_s = self._clock() + self._patience.restart_s
        while self._clock() < give_up_s:
            published = self._export(self._served, self._version)
            if published is not None:
                return published
            self._turn()
        names = ", ".join(c.name for c in self._trainers.clients)
        raise ServiceLostError(names, f"no drafter trainer answered within {self._patience.restart_s:.0f} s")

    def publish(self) -> Published | None:
        """The live drafter that `estimate` was asked about as the next version; None when it had learned nothing since
        the last one, or when it is not better than that one on those rollouts, which is told."""
        live = self._asked
        if live is None or live is self._served:
            return None
        self._wait(self._due)
        self.gain = self._found_gain()
        if self.gain is None:
            return None  # a trainer was lost before it answered: the next step asks again
        if self.gain <= 0:
            self._tell_kept()
            return None
        version, exported = self._version + 1, self._exported
        published = self._export(live, version) if exported is None else Published(version, exported)
        if published is not None:
            self._version, self._served = published.version, live
        return published

    def _found_gain(self) -> float | None:
        new, old = (self.estimates.get(name) for name in ("live", "served"))
        return None if new is None or old is None else new.acceptance_length / old.acceptance_length - 1

    def _tell_kept(self) -> None:
        new, old = (self.estimates[name].acceptance_length for name in ("live", "served"))
        self._tell(
            "drafter_kept",
            "drafter",
            f"drafter version {self._version} stays: acceptance length {old:.3f} on new rollouts, "
            f"{new:.3f} with what was learned since",
        )

    def _export(self, state: Blob, version: int) -> Published | None:
        """A trainer lost during the export is told; the next one is asked, and failing all, the next step."""
        for slot in self._trainers.up:
            pending, blob = self._trainers.clients[slot].export(state)
            if self._trainers.ask(slot, pending) is not None:
                return Published(version, blob)
        return None
