"""Consolidation of the tail: whether the last rollouts of some servers should go on at another one. Pure.

When a few long responses are left on every server, no slot is free although most of each is unused. Moving a server's
last ones frees its slot for the drafter, at the price of computing their tokens again and of a fuller server. It pays
if the slot seconds won are several times that price, and it must not hold up the phase: its last rollout ends when it
would have ended, within a small tolerance. How long a response will still be nobody knows: lengths have a heavy tail,
so one that has come this far is expected to go as far again, within its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TailRequest:
    """A running rollout: `num_tokens` of at most `max_tokens` are there; `moved`: it has been moved once."""

    rollout_id: str
    num_prompt: int
    num_tokens: int
    max_tokens: int
    acceptance_length: float | None = None
    moved: bool = False

    @property
    def expected_rest(self) -> int:
        return max(1, min(self.num_tokens, self.max_tokens - self.num_tokens))


@dataclass(frozen=True, slots=True)
class ServerTail:
    """What runs at one server, which can run `capacity` at once; `useful`: its slot could train the drafter."""

    slot: int
    requests: tuple[TailRequest, ...]
    capacity: int
    useful: bool = True


class Costs(Protocol):
    """`services.coordinator.rates.RateBook` learns them."""

    def seconds_per_token(self, slot: int, running: int) -> float: ...

    def prefill_rate(self, slot: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """`max_delay`: by which part of its remaining time the phase may end later. A slot must be won for at least
    `min_freed_s`, and for `worth` times what moving costs. `move_s`: from the decision until the first moved rollout
    goes on, its prefill excluded."""

    max_delay: float
    min_freed_s: float
    worth: float
    move_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """All rollouts of `source` go to `destination`; with what was expected of it, in seconds from now."""

    source: int
    destination: int
    rollout_ids: tuple[str, ...]
    freed_s: float
    cost_s: float
    end_before_s: float
    end_after_s: float


@dataclass(frozen=True, slots=True)
class _Load:
    """A server in the plan: those that were there, those that come, and the prefill of these."""

    slot: int
    stay: tuple[TailRequest, ...]
    come: tuple[TailRequest, ...]
    prefill_s: float

    @property
    def count(self) -> int:
        return len(self.stay) + len(self.come)


def decide(servers: Sequence[ServerTail], costs: Costs, terms: Terms, wanted: int) -> tuple[Move, ...]:
    """Which servers hand their rollouts to which, at most `wanted` of them; empty when nothing is worth it.

    `servers` are all that generate, with all they run, while no work is queued. The one with the rollout that has run
    longest never gives it away; a rollout moves once at most; the emptiest servers give first.
    """
    servers = [s for s in servers if s.requests]
    if wanted < 1 or len(servers) < 2:
        return ()
    plan = _Plan(servers, costs, terms)
    longest = max(r.num_tokens for s in servers for r in s.requests)
    moves: list[Move] = []
    for source in sorted(servers, key=lambda s: (len(s.requests), sum(r.num_tokens for r in s.requests), s.slot)):
        fixed = any(r.moved or r.num_tokens == longest for r in source.requests)
        if len(moves) < wanted and source.useful and not fixed:
            found = plan.best(source.slot, gather=wanted - len(moves) > 1)
            if found is not None:
                plan.take(found)
                moves.append(found)
    return tuple(moves)


class _Plan:
    def __init__(self, servers: Sequence[ServerTail], costs: Costs, terms: Terms) -> None:
        self._costs, self._terms = costs, terms
        self._capacity = {s.slot: s.capacity for s in servers}
        self._loads = {s.slot: _Load(s.slot, s.requests, (), 0.0) for s in servers}
        told = [r.acceptance_length for s in servers for r in s.requests if r.acceptance_length]
        self._usual = sum(told) / len(told) if told else 1.0
        self._before = self._ends(self._loads.values())
        longest, self._home = max(((r, s.slot) for s in servers for r in s.requests), key=lambda rs: rs[0].num_tokens)
        self._longest = longest.rollout_id

    def best(self, source: int, gather: bool) -> Move | None:
        """The move of a server's rollouts to where the phase ends first, if it is worth it. `gather`: more are to
        follow, so preferably to the server that stays in any case."""
        if self._loads[source].come:
            return None  # what came in this plan would move twice
        fitting = [d for d in self._loads if d != source and self._fits(source, d)]
        moves = [m for d in fitting if (m := self._move(source, d)) is not None]

        def order(m: Move) -> tuple[bool, float, int, int]:
            away = gather and m.destination != self._home
            return away, m.end_after_s, -self._loads[m.destination].count, m.destination

        return min(moves, key=order, default=None)

    def take(self, move: Move) -> None:
        self._loads = self._after(move.source, move.destination)

    def _fits(self, source: int, destination: int) -> bool:
        return self._loads[source].count + self._loads[destination].count <= self._capacity[destination]

    def _move(self, source: int, destination: int) -> Move | None:
        terms, loads = self._terms, self._after(source, destination)
        after = self._ends(loads.values())
        end_before, end_after = max(self._before.values()), max(after.values())
        late = 1 + terms.max_delay
        if end_after > late * end_before or after[self._longest] > late * self._before[self._longest]:
            return None
        leaving = self._loads[source].stay
        # Without the move the slot would be free once they have ended; no use in it lasts longer than the phase.
        freed_s = min(max(self._before[r.rollout_id] for r in leaving), end_after) - terms.move_s
        cost_s = terms.move_s + loads[destination].prefill_s - self._loads[destination].prefill_s
        if freed_s < max(terms.min_freed_s, terms.worth * cost_s):
            return None
        ids = tuple(r.rollout_id for r in leaving)
        return Move(source, destination, ids, freed_s, cost_s, end_before, end_after)

    def _after(self, source: int, destination: int) -> dict[int, _Load]:
        left = {slot: load for slot, load in self._loads.items() if slot != source}
        there, coming = left[destination], self._loads[source].stay
        tokens = sum(r.num_prompt + r.num_tokens for r in coming)
        prefill_s = there.prefill_s + tokens / self._costs.prefill_rate(destination)
        left[destination] = _Load(destination, there.stay, (*there.come, *coming), prefill_s)
        return left

    def _ends(self, loads: Collection[_Load]) -> dict[str, float]:
        """When each rollout is expected to end. A prefill holds up all of its server, the way there those that come."""
        ends: dict[str, float] = {}
        for load in loads:
            requests = (*load.stay, *load.come)
            work = {r.rollout_id: self._work(r) for r in requests}
            late = {r.rollout_id: self._terms.move_s for r in load.come}
            for rollout_id, end in drain(work, partial(self._costs.seconds_per_token, load.slot)).items():
                ends[rollout_id] = end + load.prefill_s + late.get(rollout_id, 0.0)
        return ends

    def _work(self, r: TailRequest) -> float:
        """Tokens to go, fewer where more than usual come out of a verify step."""
        return r.expected_rest * self._usual / (r.acceptance_length or self._usual)


def drain(work: dict[str, float], seconds_per_token: Callable[[int], float]) -> dict[str, float]:
    """When each of several rollouts ends that run side by side, given the tokens each has to go: a round gets faster
    whenever one of them ends."""
    ends: dict[str, float] = {}
    now = done = 0.0
    for place, (rollout_id, tokens) in enumerate(sorted(work.items(), key=lambda item: item[1])):
        now += (tokens - done) * seconds_per_token(len(work) - place)
        done = tokens
        ends[rollout_id] = now
    return ends
