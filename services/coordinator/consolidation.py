"""Consolidation of the tail: whether the last rollouts of some servers should go on at another one. Pure.

When a few long responses are left on every server, no slot is free although most of each is unused. Moving a server's
last ones frees its slot for the drafter, at the price of computing their tokens again and of a fuller server. It pays
if the slot seconds won are several times that price, and it must not hold up the phase: its last rollout ends when it
would have ended, within a small tolerance. How long a response will still be nobody knows: lengths have a heavy tail,
so one that has come this far is expected to go as far again, within its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from services.coordinator.tail_loads import Load, LoadOrder


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

    def seconds_per_token(self, slot: int, running: int) -> float:
        """Never less for more that run."""

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


def decide(servers: Sequence[ServerTail], costs: Costs, terms: Terms, wanted: int) -> tuple[Move, ...]:
    """Which servers hand their rollouts to which, at most `wanted` of them; empty when nothing is worth it.

    `servers` are all that generate, with all they run, while no work is queued. The one with the rollout that has run
    longest never gives it away; a rollout moves once at most; the emptiest servers give first.
    """
    servers = [s for s in servers if s.requests]
    if wanted < 1 or len(servers) < 2:
        return ()
    longest = max(r.num_tokens for s in servers for r in s.requests)

    def gives(s: ServerTail) -> bool:
        return s.useful and not any(r.moved or r.num_tokens == longest for r in s.requests)

    def emptiest(s: ServerTail) -> tuple[int, int, int]:
        return len(s.requests), sum(r.num_tokens for r in s.requests), s.slot

    sources = sorted(filter(gives, servers), key=emptiest)
    plan, moves = _Plan(servers, sources, costs, terms), list[Move]()
    for source in sources:
        if len(moves) == wanted:
            break
        found = plan.best(source.slot, gather=wanted - len(moves) > 1)
        if found is not None:
            plan.take(found)
            moves.append(found)
    return tuple(moves)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """What a server gives: tokens to go of each request, and the tokens of all that are computed again."""

    work: Mapping[str, float]
    tokens: int


class _Plan:
    """The moves of a decision so far.

    A server is tried as a destination only where it can matter, so that a decision takes a few tries for each server
    instead of one for each pair. A move makes no server end sooner but the one that gives, so the first destination
    with which the phase ends no later than the others do is the best. And one that would end too late with the least
    that servers of a size have left to give is not tried again for servers of this size. Both need costs that do not
    fall as more run.
    """

    def __init__(
        self, servers: Sequence[ServerTail], sources: Sequence[ServerTail], costs: Costs, terms: Terms
    ) -> None:
        self._costs, self._terms = costs, terms
        told = [r.acceptance_length for s in servers for r in s.requests if r.acceptance_length]
        self._usual = sum(told) / len(told) if told else 1.0
        self._rates = {s.slot: costs.prefill_rate(s.slot) for s in servers}
        longest, self._home = max(((r, s.slot) for s in servers for r in s.requests), key=lambda rs: rs[0].num_tokens)
        self._longest = longest.rollout_id
        self._loads = {s.slot: Load(s.slot, s.capacity, self._work(s.requests)) for s in servers}
        ends = {slot: self._ends(load) for slot, load in self._loads.items()}
        self._loads = {slot: replace(load, end_s=max(ends[slot].values())) for slot, load in self._loads.items()}
        self._before = {slot: load.end_s for slot, load in self._loads.items()}
        self._end_before = max(self._before.values())
        late = 1 + terms.max_delay
        self._latest, self._longest_latest = late * self._end_before, late * ends[self._home][self._longest]
        self._order = LoadOrder(self._loads.values())
        self._gives = {s.slot: _Bundle(self._loads[s.slot].stay, _tokens(s.requests)) for s in sources}
        self._least = _least_to_come([self._gives[s.slot] for s in sources])  # the next source's last
        self._best_rate = max(self._rates.values())
        self._size = 0

    def best(self, source: int, gather: bool) -> Move | None:
        """The next source's move to where the phase ends first, if it is worth it; of several to the fullest server.
        `gather`: more are to follow, so preferably to the server that stays in any case."""
        least, bundle = self._least.pop(), self._gives[source]
        # What came in this plan would move twice.
        if self._loads[source].come or not self._pays(source, bundle, self._best_rate):
            return None
        if len(bundle.work) != self._size:
            self._size = len(bundle.work)
            self._order.all_again()
        others_end_s, found = self._order.latest_beside(source), None
        for there in self._order.destinations(self._home if gather else None):
            move = self._move(source, bundle, there, least) if there.slot != source else None
            if move is not None and (found is None or move.end_after_s < found.end_after_s):
                found = move
                if move.end_after_s == others_end_s or (gather and there.slot == self._home):
                    break
        return found

    def take(self, move: Move) -> None:
        self._order.remove(self._loads.pop(move.source))
        there = self._loads[move.destination]
        self._order.remove(there)
        load = self._with(there, self._gives[move.source])
        load = self._loads[there.slot] = replace(load, end_s=max(self._ends(load).values()))
        self._order.add(load)

    def _move(self, source: int, bundle: _Bundle, there: Load, least: _Bundle) -> Move | None:
        if there.count + len(bundle.work) > there.capacity:
            self._order.out(there)
            return None
        if not self._pays(source, bundle, self._rates[there.slot]):
            return None
        load, terms = self._with(there, bundle), self._terms
        end_s = self._end_in_time(load)
        if end_s is None:
            if self._end_in_time(self._with(there, least), margin=1 + 1e-9) is None:
                self._order.out(there)
            return None
        end_after = max(end_s, self._order.latest_beside(source, there.slot))
        # Without the move the slot would be free once they have ended; no use in it lasts longer than the phase.
        freed_s = min(self._before[source], end_after) - terms.move_s
        cost_s = terms.move_s + load.prefill_s - there.prefill_s
        if freed_s < max(terms.min_freed_s, terms.worth * cost_s):
            return None
        return Move(source, there.slot, tuple(bundle.work), freed_s, cost_s, self._end_before, end_after)

    def _pays(self, source: int, bundle: _Bundle, prefill_rate: float) -> bool:
        """Whether the slot could be worth it if the phase were never in the way. Generous: `_move` knows exactly."""
        cost_s = self._terms.move_s + bundle.tokens / prefill_rate
        freed_s = self._before[source] - self._terms.move_s
        return freed_s * (1 + 1e-9) >= max(self._terms.min_freed_s, self._terms.worth * cost_s * (1 - 1e-9))

    def _end_in_time(self, load: Load, margin: float = 1.0) -> float | None:
        """When its last one ends; None when that is too late, or too late for the one that has run longest."""
        ends = self._ends(load)
        end_s = max(ends.values())
        longest_s = ends.get(self._longest, 0.0)
        late = end_s > margin * self._latest or longest_s > margin * self._longest_latest
        return None if late else end_s

    def _with(self, there: Load, bundle: _Bundle) -> Load:
        prefill_s = there.prefill_s + bundle.tokens / self._rates[there.slot]
        return replace(there, come={**there.come, **bundle.work}, prefill_s=prefill_s)

    def _ends(self, load: Load) -> dict[str, float]:
        """When each rollout is expected to end. A prefill holds up all of its server, the way there those that come."""
        ends = drain({**load.stay, **load.come}, partial(self._costs.seconds_per_token, load.slot))
        move_s = self._terms.move_s
        return {i: end + load.prefill_s + (move_s if i in load.come else 0.0) for i, end in ends.items()}

    def _work(self, requests: Sequence[TailRequest]) -> dict[str, float]:
        """Tokens to go, fewer where more than usual come out of a verify step."""
        usual = self._usual
        return {r.rollout_id: r.expected_rest * usual / (r.acceptance_length or usual) for r in requests}


def _tokens(requests: Sequence[TailRequest]) -> int:
    return sum(r.num_prompt + r.num_tokens for r in requests)


def _least_to_come(bundles: Sequence[_Bundle]) -> list[_Bundle]:
    """For each of these, the last one first: as many requests as it has, each with the least work, and the fewest
    tokens, of it and those of its size behind it."""
    least: list[_Bundle] = []
    for bundle in reversed(bundles):
        work, tokens = min(bundle.work.values()), bundle.tokens
        if least and len(least[-1].work) == len(bundle.work):
            work, tokens = min(work, *least[-1].work.values()), min(tokens, least[-1].tokens)
        least.append(_Bundle({f"least {n}": work for n in range(len(bundle.work))}, tokens))
    return least


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
