from __future__ import annotations

import asyncio
import math
from bisect import bisect_left

import pytest

from deploy.bench_control import DECISIONS, Load, bucket_quantile, run_bench
from deploy.provenance import ROOT
from deploy.slot_host import _Line
from services.config.load import load_config
from services.coordinator.telemetry.table import BY_NAME


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


def test_a_quantile_of_buckets_is_no_lower_than_that_of_what_they_hold() -> None:
    bounds = BY_NAME[DECISIONS].buckets
    seconds = [0.0004, 0.004, 0.004, 0.011, 0.011, 0.049, 0.051, 9.0]
    counts = [0.0] * (len(bounds) + 1)
    for one in seconds:
        counts[bisect_left(bounds, one)] += 1
    numbers = [sum(seconds), *counts]
    for share, expected in ((0.1, 0.001), (0.3, 0.005), (0.6, 0.015), (0.75, 0.05), (0.8, 0.07), (1.0, math.inf)):
        assert bucket_quantile(DECISIONS, numbers, share) == expected
    assert bucket_quantile(DECISIONS, [0.0] * len(numbers), 0.99) == 0.0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_coordinator_finishes_a_run_over_slots_that_are_not_there() -> None:
    config = load_config("reasoner-adaptive", presets_dir=ROOT / "deploy" / "presets")
    load = Load(slots=6, hosts=2, advance_s=0.2, steps=2, rollouts=8, median=60.0, longest=200, limit_s=300.0)
    found = run_bench(config, load, lambda line: None)
    assert found["steps"] == 2 and found["rollouts"] == 2 * 6 * 8
    assert 0 < found["decision_ms"]["p50"] <= found["decision_ms"]["p99"] and found["decision_mean_ms"] > 0
    assert (
        found["hosts_cpu_share"] > 0
        and found["latencies"] > 0
        and found["latency_ms"]["p99"] >= found["latency_ms"]["p50"] > 0
    )
    assert found["calls"] > 6 * 2 * 4 and found["coordinator_mb"] > 0
