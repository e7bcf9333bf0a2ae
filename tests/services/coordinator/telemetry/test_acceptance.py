"""Growth of acceptance between reports: what every interval tells adds up to the responses' own totals."""

from __future__ import annotations

import random

import pytest

from services.coordinator.telemetry.acceptance import AcceptanceGrowth, growth
from services.core.types import (
    AcceptanceStats,
    FinishReason,
    Rollout,
    RunningRequest,
    SamplingParams,
    ServedVersions,
    ServerReport,
)
from services.speculation.acceptance import AcceptanceCounter


def report(running: list[tuple[str, int, AcceptanceStats]], finished: tuple[Rollout, ...] = ()) -> ServerReport:
    requests = tuple(RunningRequest(*r) for r in running)
    return ServerReport(finished, requests, 0, 0, 0.1, "off", ServedVersions(0, 0))


def rollout(name: str, tokens: int, acceptance: AcceptanceStats) -> Rollout:
    group, index = name.split("#")
    return Rollout(
        group, "p", int(index), 0, (1,), (2,) * tokens, (0.0,) * tokens, "", FinishReason.STOP, SamplingParams(),
        (0,), (0,), acceptance,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_growth_adds_up_to_the_total(seed: int) -> None:
    rng, book, counter = random.Random(seed), AcceptanceGrowth(), AcceptanceCounter()
    steps: dict[str, int] = {}
    accepted: dict[str, int] = {}
    proposed = tokens = 0
    for turn in range(20):
        for _ in range(rng.randrange(4)):
            name, emitted = rng.choice(["eagle_2_1_3", "suffix_2_1_3"]), rng.randint(1, 3)
            counter.verify(name, 2, emitted)
            tokens += emitted
        if rng.random() < 0.3:
            counter.plain("off")
            tokens += 1
        now = counter.stats()
        told = report([], (rollout("g#0", tokens, now),)) if turn == 19 else report([("g#0", tokens, now)])
        for before, after in book.of(told):
            more_steps, more_accepted, more_proposed = growth(before, after)
            steps = {k: steps.get(k, 0) + n for k, n in more_steps.items()} | {
                k: n for k, n in steps.items() if k not in more_steps
            }
            for k, n in more_accepted.items():
                accepted[k] = accepted.get(k, 0) + n
            proposed += more_proposed
    total = counter.stats()
    assert {k: n for k, n in steps.items() if n} == dict(total.steps_by_strategy)
    assert sum(accepted.values()) == total.num_accepted_tokens
    assert accepted == dict(total.accepted_by_strategy) and proposed == total.proposed


def test_a_request_that_begins_again_counts_from_nothing() -> None:
    book = AcceptanceGrowth()
    long, short = AcceptanceStats((1, 9), 10, {"e": 10}, {"e": 9}), AcceptanceStats((1, 1), 2, {"e": 2}, {"e": 1})
    list(book.of(report([("g#0", 20, long)])))
    ((before, now),) = book.of(report([("g#0", 3, short)]))
    assert growth(before, now) == ({"e": 2}, {"e": 1}, 2)


def test_a_request_that_moves_to_another_server_brings_its_totals() -> None:
    book = AcceptanceGrowth()
    list(book.of(report([("g#0", 20, AcceptanceStats((0, 10), 10, {"e": 10}, {"e": 10}))])))
    ((before, now),) = book.of(report([("g#0", 22, AcceptanceStats((0, 11), 11, {"e": 11}, {"e": 11}))]))
    assert growth(before, now) == ({"e": 1}, {"e": 1}, 1)


def test_what_was_taken_back_is_not_negative() -> None:
    before, now = AcceptanceStats((0, 5), 5, {"e": 5}, {"e": 5}), AcceptanceStats((1, 4), 5, {"e": 5}, {"e": 4})
    assert growth(before, now) == ({"e": 0}, {"e": 0}, 0)
