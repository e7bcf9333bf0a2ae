"""The meter: what it adds up, what it forgets, and that its thread ends."""

from __future__ import annotations

import threading
import time

import pytest

from services.energy.meter import EnergyMeter
from tests.services.energy.scripted import ScriptedReader


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sampled(reader: ScriptedReader, clock: Clock, times: list[float], capacity: int = 100) -> EnergyMeter:
    """A meter that was asked at these times, without its thread."""
    meter = EnergyMeter(reader, clock, capacity=capacity)
    for at in times:
        clock.now = at
        meter.sample()
    return meter


def test_joules_are_differences_of_the_counter() -> None:
    clock = Clock()
    reader = ScriptedReader(clock, {"GPU-a": lambda t: 5000 + 300 * t}, {"0": "GPU-a"})
    (gpu,) = sampled(reader, clock, [100.0, 101.0, 103.0]).read(None).gpus
    assert (gpu.uuid, gpu.method, gpu.resets, gpu.error) == ("GPU-a", "counter", 0, None)
    # The question itself brings no fourth sample: its clock has not moved.
    assert gpu.times_s == (100.0, 101.0, 103.0) and gpu.joules == (0.0, 300.0, 900.0)


def test_a_question_brings_a_fresh_sample_and_the_one_before_the_asked_time() -> None:
    clock = Clock()
    meter = sampled(ScriptedReader(clock, {"GPU-a": lambda t: 10 * t}, {"0": "GPU-a"}), clock, [100, 101, 102, 103])
    clock.now = 103.5
    reading = meter.read(102.5)
    assert reading.gpus[0].times_s == (102, 103, 103.5) and reading.gpus[0].joules == (20, 30, 35)
    assert reading.now_s == 103.5 and reading.entries == {"0": "GPU-a"}
    assert meter.read(102).gpus[0].times_s[0] == 102
    assert meter.read(50).gpus[0].times_s[0] == 100


def test_a_counter_that_restarts_counts_as_a_lower_bound_and_never_falls() -> None:
    clock = Clock()
    counter = {100: 900.0, 101: 1000.0, 102: 40.0, 103: 140.0}
    meter = sampled(ScriptedReader(clock, {"GPU-a": lambda t: counter[int(t)]}), clock, [100, 101, 102, 103])
    (gpu,) = meter.read(None).gpus
    assert gpu.joules == (0, 100, 140, 240) and gpu.resets == 1


def test_without_a_counter_power_is_integrated() -> None:
    clock = Clock()
    reader = ScriptedReader(clock, {"GPU-a": lambda t: 100 + 50 * (t - 100)}, power=True)
    (gpu,) = sampled(reader, clock, [100, 101, 104]).read(None).gpus
    assert gpu.method == "power"
    assert gpu.joules == (0, 125, 125 + 3 * (150 + 300) / 2)


def test_the_ring_forgets_the_oldest_samples_only() -> None:
    clock = Clock()
    meter = sampled(ScriptedReader(clock, {"GPU-a": lambda t: 10 * t}), clock, [100, 101, 102, 103, 104], capacity=3)
    (gpu,) = meter.read(None).gpus
    assert gpu.times_s == (102, 103, 104) and gpu.joules == (20, 30, 40)


def test_a_missing_gpu_leaves_the_others_and_may_come_back() -> None:
    clock = Clock()
    reader = ScriptedReader(clock, {"GPU-a": lambda t: 10 * t, "GPU-b": lambda t: 20 * t})
    meter = sampled(reader, clock, [100, 101])
    reader.gone.add("GPU-b")
    clock.now = 102
    a, b = meter.read(None).gpus
    assert (a.joules[-1], a.error) == (20, None)
    assert b.times_s == (100, 101) and b.error is not None and "GPU-b" in b.error
    reader.gone.clear()
    clock.now = 104
    _, b = meter.read(None).gpus
    assert (b.times_s[-1], b.joules[-1], b.error) == (104, 80, None)


def test_the_thread_samples_and_stops() -> None:
    before = threading.active_count()
    reader = ScriptedReader(time.monotonic, {"GPU-a": lambda t: 10 * t})
    meter = EnergyMeter(reader, time.monotonic, period_s=0.01)
    meter.start()
    give_up = time.monotonic() + 60
    while len(meter.read(None).gpus[0].times_s) < reader.reads / 2 + 5:  # more than the questions brought
        assert time.monotonic() < give_up, "the thread does not sample"
        time.sleep(0.05)
    meter.stop()
    assert threading.active_count() == before and reader.closed
    reads = reader.reads
    time.sleep(0.1)
    assert reader.reads == reads


def test_a_meter_that_was_never_started_stops_too() -> None:
    reader = ScriptedReader(time.monotonic, {"GPU-a": lambda t: t})
    EnergyMeter(reader, time.monotonic).stop()
    assert reader.closed


@pytest.mark.parametrize("power", [False, True])
def test_samples_at_one_moment_count_once(power: bool) -> None:
    clock = Clock()
    reader = ScriptedReader(clock, {"GPU-a": lambda t: 7.0}, power=power)
    (gpu,) = sampled(reader, clock, [100, 100, 100]).read(None).gpus
    assert gpu.times_s == (100,)
