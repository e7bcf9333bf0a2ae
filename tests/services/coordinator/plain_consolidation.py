"""Consolidation as it is defined: every server compared with every other, each time with all that runs anywhere. The
real one must come to the same moves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from services.coordinator.consolidation import Costs, Move, ServerTail, TailRequest, Terms, drain


@dataclass(frozen=True, slots=True)
class Load:
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
    plan = Plan(servers, costs, terms)
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


class Plan:
    def __init__(self, servers: Sequence[ServerTail], costs: Costs, terms: Terms) -> None:
        self._costs, self._terms = costs, terms
        self._capacity = {s.slot: s.capacity for s in servers}
        self._loads = {s.slot: Load(s.slot, s.requests, (), 0.0) for s in servers}
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

    def _after(self, source: int, destination: int) -> dict[int, Load]:
        left = {slot: load for slot, load in self._loads.items() if slot != source}
        there, coming = left[destination], self._loads[source].stay
        tokens = sum(r.num_prompt + r.num_tokens for r in coming)
        prefill_s = there.prefill_s + tokens / self._costs.prefill_rate(destination)
        left[destination] = Load(destination, there.stay, (*there.come, *coming), prefill_s)
        return left

    def _ends(self, loads: Collection[Load]) -> dict[str, float]:
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
