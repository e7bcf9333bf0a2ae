"""The rollout servers as one body: opening them for a phase, loading versions, losing them and getting them back.

A slot's server is *ready* when it has acknowledged its epoch and serves exactly the published versions. It says itself
what it serves when it adopts the epoch, so one that was restarted unnoticed between two phases is simply loaded again.
Calls of one caller to one service run in order, so of the loads that follow only the last answer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.coordinator.calls import Calls
from services.coordinator.leases import SERVING, LeaseBook
from services.core.errors import ServiceLostError, WeightError
from services.core.protocols import Blob, Clock, Pending, RolloutClient
from services.core.types import HiddenStateChunk, RunEvent, ServedVersions, SlotState

Keep = Callable[[HiddenStateChunk, Blob], None]

# How long to let a restarting process be before asking again whether it is there.
PROBE_PAUSE_S = 0.5
# The same once it is given up: a cut cable may be mended an hour later.
GONE_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Published:
    """`copy`, of a policy: asks the policy trainer for the weights themselves, when `blob` is an offer of them that a
    server could not redeem."""

    version: int
    blob: Blob
    copy: Callable[[], tuple[Pending[int], Blob]] | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """Time-outs in seconds: for one call, and for a lost service to come back."""

    call_s: float
    restart_s: float


class Fleet:
    """`policy` and `drafter` are what every server must serve; `forced` is a strategy name or None. `lends`: the policy
    trainer gets the slots' GPUs in turns, and a server that is opened takes its memory back first."""

    def __init__(
        self,
        servers: Sequence[RolloutClient],
        leases: LeaseBook,
        calls: Calls,
        clock: Clock,
        patience: Patience,
        tell: Callable[[str, str, str], RunEvent],
        lends: bool = False,
    ) -> None:
        self._lends = lends
        self.servers = tuple(servers)
        self._leases = leases
        self._calls = calls
        self._clock = clock
        self._patience = patience
        self._tell = tell
        self.policy: Published | None = None
        self.drafter: Published | None = None
        self.forced: str | None = None
        self.on_lost: Callable[[int], None] = lambda slot: None
        self.on_new: Callable[[int, int], None] = lambda slot, epoch: None  # a server that serves nothing yet is opened
        self.on_blobs_lost: Callable[[], None] = lambda: None  # weights that a server needs: publish them again
        self._served: list[ServedVersions | None] = [None for _ in servers]
        self._uses: dict[int, str | None] = {}  # what servers acknowledged that they are forced to use
        self._ready: set[int] = set()
        self.touched: set[int] = set()  # slots whose readiness changed since whoever looks cleared it
        self._gone: set[int] = set()

    # ------------------------------------------------------------------ what others may ask

    @property
    def expected(self) -> ServedVersions:
        return ServedVersions(
            self.policy.version if self.policy else None, self.drafter.version if self.drafter else None
        )

    def ready(self, slot: int) -> bool:
        return slot in self._ready and self._leases.state(slot) in SERVING

    def served(self, slot: int) -> ServedVersions | None:
        """What the slot's server acknowledged last; None after a loss and before the first load."""
        return self._served[slot]

    def client(self, slot: int) -> RolloutClient:
        return self.servers[slot]

    # ------------------------------------------------------------------ opening and releasing

    def open_all(self) -> None:
        """Open every server that is not lost and wait until it is ready. Raises when none can serve."""
        while True:
            self.require_some()
            if self._calls.blobs_lost:
                self.on_blobs_lost()
            for slot in self._leases.in_state(SlotState.IDLE):
                self.open(slot)
            if self._ready and self._ready.issuperset(self._leases.in_state(*SERVING)):
                return
            self._calls.turn()

    def open(self, slot: int) -> None:
        """Lease an IDLE slot to its server and bring it to the published versions."""
        lease = self._leases.change(slot, SlotState.ROLLOUT, self._leases[slot].epoch, self._clock())
        self._unready(slot)
        pending = self.servers[slot].open_epoch(lease.epoch)
        self._post(slot, pending, lambda versions: self._adopted(slot, lease.epoch, versions))

    def release(self, slot: int) -> None:
        """The server has nothing left: its slot becomes IDLE."""
        self._unready(slot)
        self._leases.change(slot, SlotState.IDLE, self._leases[slot].epoch, self._clock())

    def release_all(self) -> None:
        for slot in self._leases.in_state(*SERVING):
            self._calls.drop(self.servers[slot].name)
            self.release(slot)

    def force(self, name: str | None) -> None:
        """Have every server use this strategy; None gives the choice back to the selector. Slots hold no work."""
        self.release_all()  # opening tells a server its strategy
        self.forced = name
        self.open_all()

    def renew_ready(self) -> None:
        """Start a phase with fresh leases: between two phases nothing was asked, so no heartbeat was owed."""
        for slot in self._leases.in_state(*SERVING):
            self._heard(slot, self._leases[slot].epoch)

    def check_versions(self, slot: int, versions: ServedVersions) -> None:
        """Refuse to go on with a server that serves something else than was published."""
        if versions != self.expected:
            name = self.servers[slot].name
            message = f"{name} serves {_say(versions)} where {_say(self.expected)} was published"
            self._tell("version_mismatch", name, message)
            raise WeightError(f"{message}: stop here rather than train on rollouts of unknown weights")

    def take_states(self, step: int) -> list[tuple[HiddenStateChunk, Blob]]:
        """The hidden states that the servers kept since the last call, of those that have any; slots are IDLE before
        and after. What a server kept that is lost meanwhile is lost with it."""
        taken: list[tuple[HiddenStateChunk, Blob]] = []

        def visit(slot: int, epoch: int, _: ServedVersions) -> None:
            self._heard(slot, epoch)
            self.collect(slot, step, lambda chunk, blob: taken.append((chunk, blob)), lambda: self.release(slot))

        self._visit(visit)
        return taken

    def collect(
        self,
        slot: int,
        step: int,
        keep: Keep,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask a server that holds its lease for the hidden states it kept: `keep` gets them if there are any."""
        epoch = self._leases[slot].epoch
        pending, blob = self.servers[slot].take_states(step, epoch)

        def told(chunk: HiddenStateChunk) -> None:
            self._heard(slot, epoch)
            self._taken(slot, chunk, blob, keep)
            then()

        self._post(slot, pending, told)

    def _taken(self, slot: int, chunk: HiddenStateChunk, blob: Blob, keep: Keep) -> None:
        if chunk.num_sequences:
            keep(chunk, blob)
        if chunk.num_missing or chunk.lost_bytes:
            self._tell("states_dropped", self.servers[slot].name, _say_missing(chunk))

    def lend(self, step: int | None = None, keep: Keep = lambda chunk, blob: None) -> None:
        """Have every server release its memory, if they lend it at all, and wait until each that is not lost has, also
        one that comes back meanwhile; slots are IDLE before and after. With a `step` they are asked for the hidden
        states they kept as well, which lie in host memory: `keep` gets them as they come, all of them before
        `take_rest` returns."""
        if step is None and not self._lends:
            return
        lent: set[tuple[int, int]] = set()

        def let_go(slot: int, epoch: int) -> None:
            self.release(slot)
            lent.add((slot, self._leases[slot].epoch))
            if step is not None:
                pending, blob = self.servers[slot].take_states(step, epoch)
                taken = partial(self._taken, slot, blob=blob, keep=keep)
                # Of one that is lost they are too; opening it for the next step will find out
                self._calls.post(self.servers[slot].name, pending, taken, lambda reason: None, self._patience.call_s)

        def visit(slot: int, epoch: int, _: ServedVersions) -> None:
            self._heard(slot, epoch)
            if self._lends:
                self._post(slot, self.servers[slot].switch_memory(True, epoch), lambda _: let_go(slot, epoch))
            else:
                let_go(slot, epoch)

        while any((slot, self._leases[slot].epoch) not in lent for slot in self._leases.in_state(SlotState.IDLE)):
            self._visit(visit)

    def take_rest(self) -> None:
        """Wait for the hidden states that `lend` asked for."""
        while any(self._calls.outstanding(server.name) for server in self.servers):
            self._calls.turn()

    def survey(self) -> list[ServedVersions]:
        """What every server that answers serves; slots are IDLE before and after."""
        found: list[ServedVersions] = []

        def note(slot: int, epoch: int, versions: ServedVersions) -> None:
            found.append(versions)
            self.release(slot)

        self._visit(note)
        return found

    def _visit(self, then: Callable[[int, int, ServedVersions], None]) -> None:
        """Open every IDLE slot's server and go on with (slot, epoch, what it serves), until all slots are released."""
        asked = self._leases.in_state(SlotState.IDLE)
        for slot in asked:
            epoch = self._leases.change(slot, SlotState.ROLLOUT, self._leases[slot].epoch, self._clock()).epoch
            self._post(slot, self.servers[slot].open_epoch(epoch), partial(then, slot, epoch))
        while any(self._leases.state(slot) in SERVING for slot in asked):
            self._calls.turn()

    # ------------------------------------------------------------------ losing and getting back

    def lose(self, slot: int, reason: str) -> None:
        """The slot's holder died or fell silent: LOST until its server answers again."""
        if self._leases.state(slot) is SlotState.LOST:
            return
        name = self.servers[slot].name
        self._calls.drop(name)
        self._unready(slot)
        self._served[slot] = None
        self._uses.pop(slot, None)
        self._leases.change(slot, SlotState.LOST, self._leases[slot].epoch, self._clock())
        self._tell("slot_lost", name, f"slot {slot} is lost: {reason}")
        self.on_lost(slot)
        self._probe(slot, self._clock() + self._patience.restart_s)

    def expire(self) -> None:
        """Declare lost every slot whose lease ran out."""
        for slot in self._leases.expired(self._clock()):
            self.lose(slot, "its lease ran out without a heartbeat")

    def require_some(self) -> None:
        """Raise ServiceLostError when no server is left and none will come back."""
        if len(self._gone) == len(self.servers):
            names = ", ".join(s.name for s in self.servers)
            raise ServiceLostError(
                names, f"no rollout server is left and none came back within {self._patience.restart_s:.0f} s"
            )

    def _probe(self, slot: int, give_up_s: float) -> None:
        def again(reason: str) -> None:
            if self._clock() >= give_up_s and slot not in self._gone:
                self._gone.add(slot)
                self._tell("server_gone", self.servers[slot].name, f"did not come back: {reason}")
            self._calls.later(GONE_PAUSE_S if slot in self._gone else PROBE_PAUSE_S, ask)

        def ask() -> None:
            left = max(1.0, give_up_s - self._clock())
            client = self.servers[slot]
            self._calls.post(client.name, client.process_id(), lambda pid: self._returned(slot, pid), again, left)

        ask()

    def _returned(self, slot: int, process_id: int) -> None:
        self._gone.discard(slot)
        self._leases.change(slot, SlotState.IDLE, self._leases[slot].epoch, self._clock())
        self._tell("slot_returned", self.servers[slot].name, f"slot {slot} is back, process {process_id}")

    # ------------------------------------------------------------------ acknowledgements

    def _post(self, slot: int, pending: Pending[Any], done: Callable[[Any], None]) -> None:
        lost = partial(self.lose, slot)
        self._calls.post(self.servers[slot].name, pending, done, lost, self._patience.call_s)

    def _post_load(
        self,
        slot: int,
        pending: Pending[Any],
        done: Callable[[Any], None],
        untransferred: Callable[[str], None] | None,
    ) -> None:
        """Weights that are lost leave the server as it is, not ready: whoever opens servers publishes them again."""
        lost, gone = partial(self.lose, slot), partial(self._unloaded, slot)
        name, call_s = self.servers[slot].name, self._patience.call_s
        self._calls.post(name, pending, done, lost, call_s, untransferred, gone)

    def _unloaded(self, slot: int, reason: str) -> None:
        self._calls.drop(self.servers[slot].name)
        self._unready(slot)
        self._tell("weights_lost", self.servers[slot].name, reason)

    def _heard(self, slot: int, epoch: int) -> None:
        self._leases.renew(slot, epoch, self._clock())

    def _adopted(self, slot: int, epoch: int, has: ServedVersions, copy: Blob | None = None) -> None:
        """The server holds the epoch and says what it serves: send what it lacks, and wait for the last answer. `copy`:
        the policy's weights, where their offer was of no use."""
        self._heard(slot, epoch)
        client, last = self.servers[slot], self._served[slot]
        if last is not None and has != last:
            self._tell("server_restarted", client.name, f"it serves {_say(has)} where it had {_say(last)}")
        if has.policy is None:
            self._uses.pop(slot, None)
            self.on_new(slot, epoch)
        if self._lends:
            self._post(slot, client.switch_memory(False, epoch), lambda _: self._heard(slot, epoch))
        loads: list[Pending[ServedVersions]] = []
        if self.policy is not None and has.policy != self.policy.version:
            loads.append(client.load_policy(self.policy.version, self.policy.blob if copy is None else copy, epoch))
        if self.drafter is not None and has.drafter != self.drafter.version:
            loads.append(client.load_drafter(self.drafter.version, self.drafter.blob, epoch))
        failed = partial(self._untransferred, slot, epoch, has) if copy is None else None
        for pending in loads[:-1]:
            self._post_load(slot, pending, lambda _: self._heard(slot, epoch), failed)
        for pending in loads[-1:]:
            self._post_load(slot, pending, lambda answer: self._opened(slot, epoch, answer), failed)
        self._force(
            slot, epoch, (lambda: self._heard(slot, epoch)) if loads else lambda: self._opened(slot, epoch, has)
        )

    def _force(self, slot: int, epoch: int, then: Callable[[], None]) -> None:
        """Have the server use what is forced, unless it has acknowledged that before: a call less for each server and
        phase."""
        name = self.forced
        if slot in self._uses and self._uses[slot] == name:
            then()
            return
        self._uses.pop(slot, None)  # until the answer, which may never come, it uses the one or the other

        def done(_: None) -> None:
            self._uses[slot] = name
            then()

        self._post(slot, self.servers[slot].set_strategy(name, epoch), done)

    def _untransferred(self, slot: int, epoch: int, has: ServedVersions, reason: str) -> None:
        """The policy did not reach the server over a direct connection. It gets a copy through the object store, so
        that the run goes on where no connection works; the next version tries again."""
        self._heard(slot, epoch)
        name, policy = self.servers[slot].name, self.policy
        self._calls.drop(name)  # what follows a failed load in its queue answers with the old version
        self._tell("transfer_failed", name, f"{reason}; the policy goes to {name} through the object store")
        assert policy is not None and policy.copy is not None, "only an offer fails like that"
        pending, copy = policy.copy()

        def made(_: int) -> None:
            if self._leases[slot].epoch == epoch and self._leases.state(slot) in SERVING:
                self._heard(slot, epoch)
                self._adopted(slot, epoch, has, copy)

        def no_copy(reason: str) -> None:
            raise ServiceLostError("policy", reason)

        def superseded(reason: str) -> None:
            self.lose(slot, reason)

        self._calls.post("policy", pending, made, no_copy, self._patience.call_s, superseded)

    def _opened(self, slot: int, epoch: int, versions: ServedVersions) -> None:
        self._heard(slot, epoch)
        self.check_versions(slot, versions)
        self._served[slot] = versions
        self._ready.add(slot)
        self.touched.add(slot)

    def _unready(self, slot: int) -> None:
        self._ready.discard(slot)
        self.touched.add(slot)


def _say(versions: ServedVersions) -> str:
    return f"policy version {versions.policy} and drafter version {versions.drafter}"


def _say_missing(chunk: HiddenStateChunk) -> str:
    message = f"hidden states of {chunk.num_missing} rollouts are missing or cut short"
    if not chunk.lost_bytes:
        return message
    return f"{message}: {chunk.lost_bytes} bytes found no room, raise rollout.engine.capture_bytes"
