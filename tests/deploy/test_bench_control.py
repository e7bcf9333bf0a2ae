from __future__ import annotations

import asyncio

import pytest

from deploy.bench_control import Load, run_bench
from deploy.provenance import ROOT
from deploy.slot_host import _Line
from services.config.load import load_config


def test_calls_of_a_service_run_in_their_order_however_they_arrive() -> None:
    async def all_of_them() -> list[int]:
        line, seen = _Line(), list[int]()

        async def one(number: int) -> None:
            await line.enter(number)
            seen.append(number)
            await asyncio.sleep(0)
            line.leave()

        await asyncio.gather(*(one(n) for n in (3, 0, 2, 1, 4)))
        return seen

    assert asyncio.run(all_of_them()) == [0, 1, 2, 3, 4]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_coordinator_finishes_a_run_over_slots_that_are_not_there() -> None:
    config = load_config("reasoner-adaptive", presets_dir=ROOT / "deploy" / "presets")
    load = Load(slots=6, hosts=2, advance_s=0.2, steps=2, rollouts=8, median=60.0, longest=200, limit_s=300.0)
    found = run_bench(config, load, lambda line: None)
    assert found["steps"] == 2 and found["rollouts"] == 2 * 6 * 8
    assert found["latencies"] > 0 and found["latency_ms"]["p99"] >= found["latency_ms"]["p50"] > 0
    assert found["calls"] > 6 * 2 * 4 and found["coordinator_mb"] > 0
