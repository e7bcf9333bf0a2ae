"""When the last rollouts of a server go on at another one: the rules, over random tails and cost models."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.consolidation import Move, ServerTail, TailRequest, Terms, decide, drain
from services.coordinator.rates import RateBook
from services.core.types import AcceptanceStats, RunningRequest, ServedVersions, ServerReport
from tests.services.coordinator import plain_consolidation
from tests.services.coordinator.test_ledger import rollout
from tests.services.coordinator.test_scheduler import works

TERMS = Terms(max_delay=0.02, min_freed_s=1.0, worth=2.0, move_s=0.3)


@dataclass(frozen=True)
class Linear:
    """A token takes `base` seconds, and `slope` more for each request beside it."""

    base: float = 0.01
    slope: float = 0.0
    prefill: float = 10_000.0

    def seconds_per_token(self, slot: int, running: int) -> float:
        return self.base * (1 + self.slope * (running - 1))

    def prefill_rate(self, slot: int) -> float:
        return self.prefill


def tail(slot: int, *tokens: int, capacity: int = 8, budget: int = 10_000, useful: bool = True) -> ServerTail:
    requests = tuple(TailRequest(f"g{slot}#{n}", 100, t, budget) for n, t in enumerate(tokens))
    return ServerTail(slot, requests, capacity, useful)


# -- cases


def test_the_few_last_ones_go_to_where_the_longest_runs_or_the_most() -> None:
    (move,) = decide([tail(0, 900), tail(1, 500)], Linear(), TERMS, 1)
    assert (move.source, move.destination, move.rollout_ids) == (1, 0, ("g1#0",))
    assert move.end_before_s == pytest.approx(9.0) and move.cost_s == pytest.approx(0.3 + 0.06)
    assert move.freed_s == pytest.approx(5.0 - 0.3)


def test_the_longest_is_not_held_up_when_a_fuller_server_is_slower() -> None:
    """On a machine where a second request costs a tenth, it goes to a server whose own ends early enough."""
    servers = [tail(0, 900), tail(1, 500), tail(2, 400)]
    (move,) = decide(servers, Linear(slope=0.1), TERMS, 1)
    assert (move.source, move.destination) == (2, 1)
    assert decide(servers[:2], Linear(slope=0.1), TERMS, 1) == ()
    (bold,) = decide(servers[:2], Linear(slope=0.1), replace(TERMS, max_delay=0.2), 1)
    assert (bold.source, bold.destination) == (1, 0) and bold.end_after_s > bold.end_before_s


def test_several_servers_end_up_at_one() -> None:
    servers = [tail(0, 2000, 1800), tail(1, 700), tail(2, 650, 600), tail(3, 500)]
    moves = decide(servers, Linear(prefill=1e5), TERMS, 3)
    assert [m.source for m in moves] == [3, 1, 2] and {m.destination for m in moves} == {0}
    assert len(decide(servers, Linear(prefill=1e5), TERMS, 2)) == 2


def test_nothing_moves_that_is_not_worth_it() -> None:
    servers = [tail(0, 900), tail(1, 500)]
    assert decide(servers, Linear(), TERMS, 0) == ()
    assert decide(servers[:1], Linear(), TERMS, 1) == ()
    assert decide(servers, Linear(), replace(TERMS, min_freed_s=5.0), 1) == ()
    assert decide(servers, Linear(), replace(TERMS, worth=20.0), 1) == ()
    slow = replace(TERMS, max_delay=1.0)
    assert decide(servers, Linear(prefill=300.0), slow, 1) and not decide(servers, Linear(prefill=200.0), slow, 1)
    assert decide(servers, Linear(prefill=300.0), TERMS, 1) == (), "the longest would wait 2 s for the prefill"
    assert decide([tail(0, 900), tail(1, 500, budget=550)], Linear(), TERMS, 1) == (), "50 tokens to go at most"
    assert decide([tail(0, 900), tail(1, 500, useful=False)], Linear(), TERMS, 1) == ()
    assert decide([tail(0, 900, capacity=1), tail(1, 500)], Linear(), TERMS, 1) == ()


def test_a_rollout_that_is_accepted_well_ends_sooner() -> None:
    slow, fast = (
        [
            ServerTail(0, (TailRequest("a", 10, 900, 9999, 2.0),), 8),
            ServerTail(1, (TailRequest("b", 10, 500, 9999, acceptance),), 8),
        ]
        for acceptance in (2.0, 4.0)
    )
    assert decide(slow, Linear(), replace(TERMS, min_freed_s=4.5), 1)
    assert not decide(fast, Linear(), replace(TERMS, min_freed_s=4.5), 1)


def test_draining_gets_faster_as_rollouts_end() -> None:
    assert drain({"a": 10, "b": 30, "c": 20}, lambda n: n) == {"a": 30, "c": 50, "b": 60}
    assert drain({}, lambda n: n) == {}


# -- properties

REQUESTS = st.builds(
    lambda tokens, budget, prompt, acceptance, moved: (tokens, max(tokens + 1, budget), prompt, acceptance, moved),
    st.integers(1, 3000), st.integers(1, 4000), st.integers(1, 300), st.none() | st.floats(1.0, 5.0),
    st.sampled_from([False] * 5 + [True]),
)  # fmt: skip
COSTS = st.builds(Linear, st.floats(0.001, 0.1), st.floats(0.0, 1.0), st.floats(50, 1e5))
LIMITS = st.builds(
    Terms, st.sampled_from([0.0, 0.02, 0.2]), st.floats(0.0, 5.0), st.floats(1.0, 4.0), st.floats(0.0, 1.0)
)


@st.composite
def tails(draw: st.DrawFn) -> list[ServerTail]:
    servers = []
    for slot in range(draw(st.integers(1, 6))):
        given_ = draw(st.lists(REQUESTS, max_size=4))
        requests = tuple(
            TailRequest(f"s{slot}#{n}", prompt, tokens, budget, acceptance, moved)
            for n, (tokens, budget, prompt, acceptance, moved) in enumerate(given_)
        )
        servers.append(ServerTail(slot, requests, max(len(given_), draw(st.integers(1, 8))), draw(st.booleans())))
    return servers


def applied(servers: list[ServerTail], moves: tuple[Move, ...]) -> dict[int, tuple[TailRequest, ...]]:
    runs = {s.slot: s.requests for s in servers}
    for move in moves:
        assert move.rollout_ids == tuple(r.rollout_id for r in runs[move.source])
        runs[move.destination] += runs.pop(move.source)
    return runs


@settings(max_examples=500)
@given(tails(), COSTS, LIMITS, st.integers(0, 5))
def test_whatever_the_tail_the_rules_hold(servers: list[ServerTail], costs: Linear, terms: Terms, wanted: int) -> None:
    moves = decide(servers, costs, terms, wanted)
    assert len(moves) <= wanted
    runs = applied(servers, moves)
    before = sorted(r.rollout_id for s in servers for r in s.requests)
    assert sorted(r.rollout_id for rs in runs.values() for r in rs) == before, "a rollout is lost or doubled"
    by_slot = {s.slot: s for s in servers}
    longest = max((r.num_tokens for s in servers for r in s.requests), default=0)
    moved = [i for m in moves for i in m.rollout_ids]
    assert len(set(moved)) == len(moved), "moved twice"
    for m in moves:
        source = by_slot[m.source]
        assert source.useful and source.requests and not any(r.moved for r in source.requests)
        assert all(r.num_tokens < longest for r in source.requests), "the longest was moved"
        assert m.destination not in {n.source for n in moves} and by_slot[m.destination].requests
        assert len(runs[m.destination]) <= by_slot[m.destination].capacity
        assert m.freed_s >= terms.min_freed_s and m.freed_s >= terms.worth * m.cost_s
        assert m.cost_s >= terms.move_s and m.end_after_s <= (1 + terms.max_delay) * m.end_before_s
    assert decide(servers, costs, replace(terms, min_freed_s=1e9), wanted) == ()


@dataclass(frozen=True)
class Uneven(Linear):
    """Every server at another speed."""

    def seconds_per_token(self, slot: int, running: int) -> float:
        return super().seconds_per_token(slot, running) * (1 + slot % 3)

    def prefill_rate(self, slot: int) -> float:
        return self.prefill / (1 + slot % 4)


UNEVEN = st.builds(Uneven, st.floats(0.001, 0.1), st.sampled_from([0.0, 0.01, 0.1, 1.0]), st.floats(50, 1e5))


@settings(max_examples=500)
@given(tails(), COSTS | UNEVEN, LIMITS, st.integers(0, 6))
def test_the_moves_are_those_of_comparing_every_server_with_every_other(
    servers: list[ServerTail], costs: Linear, terms: Terms, wanted: int
) -> None:
    assert decide(servers, costs, terms, wanted) == plain_consolidation.decide(servers, costs, terms, wanted)


def fleet(count: int, seed: int, most: int = 3) -> list[ServerTail]:
    """The tail of a step: a few rollouts at every server, log-normal."""
    rng = random.Random(seed)

    def tokens() -> int:
        return max(1, min(15_000, round(rng.lognormvariate(7.0, 1.0))))

    return [
        tail(slot, *(tokens() for _ in range(rng.randint(1, most))), capacity=rng.choice((4, 8)), budget=16_384,
             useful=rng.random() < 0.9)
        for slot in range(count)
    ]  # fmt: skip


FLEET_COSTS = {
    "gpu": Linear(slope=0.01), "flat": Linear(), "uneven": Uneven(slope=0.05), "cpu": Linear(slope=0.5),
    "slow prefill": Linear(slope=0.01, prefill=500.0),
}  # fmt: skip


@pytest.mark.parametrize("costs", FLEET_COSTS.values(), ids=FLEET_COSTS)
@pytest.mark.parametrize("seed", range(3))
def test_larger_fleets_move_alike_too(costs: Linear, seed: int) -> None:
    for terms in (TERMS, replace(TERMS, max_delay=0.2)):
        for wanted in (1, 12):
            servers = fleet(16, seed)
            assert decide(servers, costs, terms, wanted) == plain_consolidation.decide(servers, costs, terms, wanted)


class Counting:
    """How often a cost is asked for: a try of a move asks once for each rollout of one server."""

    def __init__(self, costs: Linear) -> None:
        self._costs, self.asked = costs, 0

    def seconds_per_token(self, slot: int, running: int) -> float:
        self.asked += 1
        return self._costs.seconds_per_token(slot, running)

    def prefill_rate(self, slot: int) -> float:
        return self._costs.prefill_rate(slot)


def asked(costs: Linear, count: int) -> float:
    """For each server."""
    counting = Counting(costs)
    for seed in range(3):
        decide(fleet(count, seed), counting, TERMS, count)
    return counting.asked / 3 / count


@pytest.mark.parametrize("costs", FLEET_COSTS.values(), ids=FLEET_COSTS)
def test_a_decision_costs_about_the_same_for_each_server_however_many_there_are(costs: Linear) -> None:
    """Plainly it would be the square: 64 times as many for 8 times the servers."""
    few, many = asked(costs, 50), asked(costs, 400)
    assert many < 3 * few, f"{few:.0f} costs for each of 50 servers, {many:.0f} for each of 400"


@settings(max_examples=300)
@given(tails(), COSTS, LIMITS, st.integers(1, 5))
def test_a_simulated_tail_ends_as_late_as_the_tolerance_allows(
    servers: list[ServerTail], costs: Linear, terms: Terms, wanted: int
) -> None:
    """Played out token by token by another clockwork, with the prefill and the way there in front."""
    told = [r.acceptance_length for s in servers for r in s.requests if r.acceptance_length]
    usual = sum(told) / len(told) if told else 1.0

    def end(requests: tuple[TailRequest, ...], slot: int) -> dict[str, float]:
        left = {r.rollout_id: r.expected_rest * usual / (r.acceptance_length or usual) for r in requests}
        now, ends = 0.0, {}
        while left:
            least = min(left.values())
            now += least * costs.seconds_per_token(slot, len(left))
            ends |= {i: now for i, w in left.items() if w - least <= 1e-9}
            left = {i: w - least for i, w in left.items() if w - least > 1e-9}
        return ends

    moves = decide(servers, costs, terms, wanted)
    if not moves:
        return
    before = {i: e for s in servers for i, e in end(s.requests, s.slot).items()}
    after: dict[str, float] = {}
    for slot, requests in applied(servers, moves).items():
        came = {i for m in moves if m.destination == slot for i in m.rollout_ids}
        prefill = sum(r.num_prompt + r.num_tokens for r in requests if r.rollout_id in came) / costs.prefill
        for i, e in end(requests, slot).items():
            after[i] = e + prefill + (terms.move_s if i in came else 0.0)
    assert max(after.values()) <= (1 + terms.max_delay) * max(before.values()) + 1e-6
    (longest, *_) = sorted((r for s in servers for r in s.requests), key=lambda r: -r.num_tokens)
    assert after[longest.rollout_id] <= (1 + terms.max_delay) * before[longest.rollout_id] + 1e-6


# -- rates


def report(running: int, tokens: int, busy_s: float, finished: int = 0, waiting: int = 0, prefill: tuple = (0, 0.0)):
    (work,) = works(1, max(finished, 1))
    return ServerReport(
        finished=tuple(rollout(work, i) for i in range(finished)),
        running=tuple(RunningRequest(f"r#{n}", 5, AcceptanceStats()) for n in range(running)),
        waiting=waiting,
        new_tokens=tokens,
        busy_s=busy_s,
        strategy="off",
        versions=ServedVersions(0, 0),
        prefill_tokens=prefill[0],
        prefill_s=prefill[1],
    )


def test_rates_are_learnt_by_the_number_of_running_requests() -> None:
    book = RateBook()
    assert not book.knows(0)
    book.note(0, report(4, 400, 2.0))
    book.note(0, report(1, 100, 1.0))
    assert book.seconds_per_token(0, 4) == pytest.approx(0.02) and book.seconds_per_token(0, 1) == pytest.approx(0.01)
    assert book.seconds_per_token(0, 3) == pytest.approx(0.01 + 0.01 * 2 / 3)
    assert book.seconds_per_token(0, 8) == pytest.approx(0.04), "no throughput is won where nothing was measured"
    assert book.prefill_rate(0) == pytest.approx(200.0), "as fast as the fastest decoding, for want of better"
    book.note(0, report(4, 100, 1.5, prefill=(300, 1.0)))
    assert book.prefill_rate(0) == pytest.approx(300.0)
    assert book.knows(1) and book.seconds_per_token(1, 1) == pytest.approx(0.01), "what others showed"


def test_rates_ignore_what_tells_nothing_and_never_call_fuller_faster() -> None:
    book = RateBook()
    book.note(0, report(4, 400, 2.0, waiting=3))
    book.note(0, report(0, 0, 1.0))
    assert not book.knows(0)
    book.note(0, report(2, 100, 3.0))  # slow by chance
    book.note(0, report(5, 1000, 2.0))
    assert book.seconds_per_token(0, 5) >= book.seconds_per_token(0, 2) == pytest.approx(0.06)
    assert book.seconds_per_token(0, 1) == pytest.approx(0.06)


def test_an_engine_that_tells_its_tokens_in_lumps_has_a_rate_all_the_same() -> None:
    book = RateBook()
    for n in range(40):
        book.note(0, report(2, 64 if n % 4 == 0 else 0, 0.1))
    assert book.seconds_per_token(0, 2) == pytest.approx(2 * 0.4 / 64, rel=0.35)


def test_new_rates_take_over() -> None:
    book = RateBook()
    for tokens in [100] * 40 + [50] * 40:
        book.note(3, report(1, tokens, 1.0))
    assert book.seconds_per_token(3, 1) == pytest.approx(0.02, rel=0.05)
