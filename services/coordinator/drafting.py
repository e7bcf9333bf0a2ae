"""Training the drafter in whatever slots are idle, any number of them at a time.

    live ──begin──> slot a ──train, train, train──┐                     every slot of a round begins from the same
      │                                            ├─ merge ──> live    state; what each made of it is averaged,
      └────begin──> slot b ─────train, train──────┘                    weighted by its micro-steps

A *round* lasts about `round_s`. A slot may join in the middle of one and leave at any time: what it learned since the
round's beginning counts with its share (local SGD with weighted averaging, Stich 2019, arXiv:1805.09767; ours lets
members come and go and averages AdamW's moments too). The state lives outside the trainers as a reference, so it moves
between slots, and a killed trainer costs at most its part of one round.

A state of a large drafter is a gigabyte, as much to copy as a micro-step or two to compute. So a slot that leaves is
free with its last micro-step and its trainer hands in afterwards, beside whoever has the slot then; and when nobody
trains any more, all trainers take over what it came to, so that the next ones to join begin at once. At the end of a
phase they do when they are told to: what is decided by this state comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.coordinator.calls import Calls
from services.coordinator.fleet import Fleet
from services.coordinator.leases import LeaseBook
from services.coordinator.telemetry.facts import Telemetry
from services.coordinator.trainers import Trainers
from services.core.protocols import Blob, Clock
from services.core.types import DrafterProgress, RunEvent, SlotState


@dataclass(slots=True)
class _Lane:
    """A slot that trains. `number` tells the members of a round apart: each draws its own data. `begun_at`: the total
    of micro-steps from which it last began; `leave_s`: when it was asked to leave."""

    slot: int
    epoch: int
    number: int
    begun_at: int = 0
    trained: bool = False
    leave_s: float | None = None


FAN = 8  # parts that one trainer combines
TRIES = 3  # trainers lost over combining a round; then its best part is kept alone

Part = tuple[Blob, int]  # a state, and the micro-steps since its round's common beginning that are in it


@dataclass(slots=True)
class _Round:
    """`handing`: slots whose part is on its way. `due`: every lane hands in now. `merging`: parts by the slot whose
    trainer combines them; `lost`: trainers that did not come to an end with it."""

    started_s: float
    handing: set[int] = field(default_factory=set)
    parts: list[Part] = field(default_factory=list)
    due: bool = False
    merging: dict[int, list[Part]] = field(default_factory=dict)
    lost: int = 0


class _Numbers:
    """The least number that nobody has."""

    def __init__(self) -> None:
        self._free, self._next = list[int](), 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give(self, number: int) -> None:
        heapq.heappush(self._free, number)


class Drafting:
    """`live` is the newest state, at first that of drafter version 0; None when it was lost with its machine: nobody
    trains until there is another one."""

    def __init__(
        self,
        trainers: Trainers,
        initial: Blob | None,
        fleet: Fleet,
        leases: LeaseBook,
        calls: Calls,
        clock: Clock,
        tell: Callable[[str, str, str], RunEvent],
        budget_s: float,
        round_s: float,
        checkpoints: bool,
        telemetry: Telemetry,
    ) -> None:
        self._trainers = trainers
        self.live = initial
        self._fleet = fleet
        self._leases = leases
        self._calls = calls
        self._clock = clock
        self._tell = tell
        self._budget_s = budget_s
        self._round_s = round_s
        self._checkpoints = checkpoints
        self._telemetry = telemetry
        self._lanes: dict[int, _Lane] = {}
        self._waiting: set[int] = set()  # slots whose lane waits for the round to end
        self._keeping = False  # their leases
        self._all_left = False  # on request: `prepare` comes when what is decided by `live` is decided
        self._prepared = initial  # the state that all trainers took over last
        self._numbers = _Numbers()
        self._round = _Round(0.0)
        self.progress: list[DrafterProgress] = []
        self.preempted_s: list[float] = []  # from asking a slot to leave until it was free
        trainers.on_lost = self._trainer_lost

    @property
    def slots(self) -> list[int]:
        return sorted(self._lanes)

    # ------------------------------------------------------------------ joining and leaving

    def start(self, slot: int) -> None:
        """Lease an IDLE slot to its trainer and let it join the round, or begin one."""
        assert slot not in self._lanes
        self._all_left = False
        lease = self._leases.change(slot, SlotState.DRAFTING, self._leases[slot].epoch, self._clock())
        lane = _Lane(slot, lease.epoch, self._numbers.take())
        closing = self._round.due or bool(self._round.merging)
        ending = closing or (not self._lanes and bool(self._round.handing))
        if not self._lanes and not ending:
            self._round = _Round(self._clock())
        self._lanes[slot] = lane
        if ending:
            self._wait(slot)  # begins from what the round that is ending comes to
        else:
            self._begin(lane)

    def stop(self, slots: Sequence[int]) -> None:
        """Ask slots to leave at their next micro-step; others go on."""
        for slot in slots:
            lane = self._lanes[slot]
            if lane.leave_s is not None:
                continue
            lane.leave_s = self._clock()
            if slot in self._waiting:
                self._free(lane)
            else:
                self._trainers.post(slot, self._trainers.clients[slot].interrupt(lane.epoch))

    def stop_all(self) -> None:
        self._all_left = True
        self.stop(self.slots)

    def leave(self) -> None:
        """Stop, and wait until no slot trains: each has given back what its last micro-step took, its state apart."""
        self.stop_all()
        while self._lanes:
            self._calls.turn()
            self._fleet.expire()

    def finish(self) -> None:
        """Stop, and wait until no slot trains and `live` holds all that was learned; `prepare` is left to the caller.
        Only leases of those that train run out meanwhile: a policy that has the slots by then is heard of when it is
        done."""
        self.leave()
        while self._round.handing or self._round.merging or self._round.parts:
            self._calls.turn()
            self._close_round()

    def prepare(self) -> None:
        """Have all trainers take over `live`, if they have not: the next ones to join then begin at once."""
        self._all_left = False
        if self.live is None or self.live is self._prepared:
            return
        self._prepared = self.live
        for slot in self._trainers.up:
            self._trainers.post(slot, self._trainers.clients[slot].prepare(self.live))

    def slot_lost(self, slot: int) -> None:
        """The fleet found the slot lost (its lease ran out): whoever trained there no longer holds it."""
        if slot in self._lanes:
            self._remove(slot)
            self._trainers.lose(slot, "its slot's lease ran out")
            self._close_round()

    def _trainer_lost(self, slot: int, reason: str) -> None:
        if slot in self._lanes:
            self._remove(slot)
            self._fleet.lose(slot, f"its drafter trainer is lost: {reason}")
        if slot in self._round.merging:
            self._round.parts += self._round.merging.pop(slot)  # another one combines them
            self._round.lost += 1
        self._round.handing.discard(slot)
        self._close_round()

    # ------------------------------------------------------------------ a lane's life

    def _begin(self, lane: _Lane) -> None:
        live, client = self.live, self._trainers.clients[lane.slot]
        if live is None:
            self._give_up(lane)
            return
        self._waiting.discard(lane.slot)
        lane.trained = False

        def begun(total_steps: int) -> None:
            lane.begun_at = total_steps
            self._next(lane)

        def begin() -> None:
            pending = client.begin(live, lane.epoch, lane.number)
            self._trainers.post(lane.slot, pending, begun, lambda _: self._live_lost(lane))

        self._trainers.identified(lane.slot, begin)

    def _live_lost(self, lane: _Lane) -> None:
        self.live = None
        self._give_up(lane)
        self._close_round()

    def _give_up(self, lane: _Lane) -> None:
        if lane.leave_s is None:
            lane.leave_s = self._clock()
        self._free(lane)

    def _next(self, lane: _Lane) -> None:
        self._leases.renew(lane.slot, lane.epoch, self._clock())
        if lane.leave_s is not None or self._round.due:
            self._hand_in(lane)
            return
        pending = self._trainers.clients[lane.slot].train(self._budget_s, lane.epoch)
        self._trainers.post(lane.slot, pending, lambda progress: self._trained(lane, progress))

    def _trained(self, lane: _Lane, progress: DrafterProgress) -> None:
        self._telemetry.trained(lane.slot, progress)
        if progress.micro_steps:
            lane.trained = True
            self.progress.append(progress)
        elif lane.leave_s is None:
            lane.leave_s = self._clock()  # nothing to learn from
        self._round.due |= self._clock() - self._round.started_s >= self._round_s
        self._next(lane)

    def _hand_in(self, lane: _Lane) -> None:
        if lane.leave_s is not None:
            self._free(lane)
        else:
            self._wait(lane.slot)
        if lane.trained:
            self._take_part(lane)
        self._close_round()

    def _wait(self, slot: int) -> None:
        self._waiting.add(slot)
        if not self._keeping:
            self._keep()

    def _keep(self) -> None:
        """Renew the leases of slots that wait: their trainers are asked for nothing whose answer would be a heartbeat,
        and combining what many made can take longer than a lease. Who combines has a time-out of its own."""
        for slot in self._waiting:
            self._leases.renew(slot, self._lanes[slot].epoch, self._clock())
        self._keeping = bool(self._waiting)
        if self._keeping:
            self._calls.later(self._leases.heartbeat_s, self._keep)

    def _take_part(self, lane: _Lane) -> None:
        """What the lane learned since it began, for the round."""
        pending, state = self._trainers.clients[lane.slot].snapshot(lane.epoch)
        self._round.handing.add(lane.slot)

        def handed(total_steps: int) -> None:
            self._round.handing.discard(lane.slot)
            # The trainer's own count, not the sum of what was told: a call that ran twice is told once.
            if total_steps > lane.begun_at:
                self._round.parts.append((state, total_steps - lane.begun_at))
            self._close_round()

        self._trainers.post(lane.slot, pending, handed)

    def _free(self, lane: _Lane) -> None:
        self._remove(lane.slot)
        self._leases.change(lane.slot, SlotState.IDLE, lane.epoch, self._clock())
        assert lane.leave_s is not None
        self.preempted_s.append(self._clock() - lane.leave_s)
        self._telemetry.left(self.preempted_s[-1])

    def _remove(self, slot: int) -> None:
        self._numbers.give(self._lanes.pop(slot).number)
        self._waiting.discard(slot)

    # ------------------------------------------------------------------ ending a round

    def _close_round(self) -> None:
        """When every member has handed in or left: average, and begin the next round from that."""
        busy = self._round.handing or self._round.merging
        if busy or len(self._waiting) < len(self._lanes):
            return
        if len(self._round.parts) > 1:
            self._merge()
        elif self._round.parts:
            self._adopt(self._round.parts[0][0])
        else:
            self._next_round()

    def _merge(self) -> None:
        """A few parts by each of several trainers, side by side, then what these made: an average of averages is the
        same, and takes no longer for a thousand slots than a few times what it takes for eight."""
        parts, lanes = self._round.parts, sorted(filter(self._trainers.is_up, self._lanes))
        mergers = lanes or self._trainers.up  # who waits in its slot rather than who is beside a rollout server
        if not mergers or self._round.lost >= TRIES:
            why = (
                f"{TRIES} trainers were lost over combining a round" if mergers else "no trainer is left to combine one"
            )
            self._tell("drafter_parts_lost", "drafter", f"{why}: its best part is kept")
            self._adopt(max(parts, key=lambda part: part[1])[0])
            return
        given = min(len(mergers), len(parts) // FAN + (len(parts) % FAN > 1))  # a single part needs no combining
        self._round.parts = parts[given * FAN :]
        for n, slot in enumerate(mergers[:given]):
            self._combine(slot, parts[n * FAN : (n + 1) * FAN])

    def _combine(self, slot: int, parts: list[Part]) -> None:
        self._round.merging[slot] = parts
        pending, merged = self._trainers.clients[slot].merge([s for s, _ in parts], [n for _, n in parts])

        def combined(_: object) -> None:
            del self._round.merging[slot]
            self._round.parts.append((merged, sum(n for _, n in parts)))
            self._close_round()

        def gone(reason: str) -> None:
            del self._round.merging[slot]
            self._tell("drafter_parts_lost", "drafter", f"{len(parts)} parts of a round are lost: {reason}")
            self._close_round()

        self._trainers.post(slot, pending, combined, gone)

    def _adopt(self, state: Blob) -> None:
        self.live = state
        if not (self._lanes or self._all_left):
            self.prepare()
        if self._checkpoints and (up := self._trainers.up):
            self._trainers.post(up[0], self._trainers.clients[up[0]].checkpoint(state))
        self._next_round()

    def _next_round(self) -> None:
        self._round = _Round(self._clock())
        for lane in list(self._lanes.values()):
            self._begin(lane)
