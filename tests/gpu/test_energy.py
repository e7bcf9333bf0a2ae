"""NVML's energy counter on a real card: it rises with work, and it agrees with the card's own power."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from services.coordinator.energy import EnergyCurve
from services.core.energy import EnergyMethod
from services.energy.meter import EnergyMeter
from services.energy.nvml import NvmlReader, open_nvml

NEEDS_MODEL = False  # for the folder's conftest: neither SGLang nor a model folder
WINDOW_S = 2.0
# Newer cards tell power as the mean of the last second: comparable once the load has been steady for longer.
SETTLE_S = 3.0
SIZE = 8192


def reader_of(method: EnergyMethod) -> NvmlReader:
    """Torch's current GPU, read by this method; skips where the machine cannot."""
    entry = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    reader = open_nvml([entry])
    if reader is None:
        pytest.skip("CUDA works here but NVML does not: no libnvidia-ml.so.1 on this machine")
    (uuid, found), *_ = reader.methods.items()
    if found == "power" and method == "counter":
        reader.close()
        pytest.skip(f"{uuid} has no energy counter (older than Volta, or hidden by the virtual machine)")
    reader.methods[uuid] = method
    return reader


@pytest.fixture(scope="module")
def meters() -> Iterator[dict[str, EnergyMeter]]:
    """The same card by its counter and by its power, the latter sampled more often: it is the reference."""
    found = {
        "counter": EnergyMeter(reader_of("counter"), time.monotonic),
        "power": EnergyMeter(reader_of("power"), time.monotonic, period_s=0.02),
    }
    for meter in found.values():
        meter.start()
    yield found
    for meter in found.values():
        meter.stop()


def joules(meters: dict[str, EnergyMeter], start_s: float, end_s: float) -> dict[str, float]:
    spent = {}
    for name, meter in meters.items():
        (gpu,) = meter.read(None).gpus
        assert gpu.error is None and gpu.resets == 0
        curve = EnergyCurve(gpu.times_s, gpu.joules)
        assert curve.covers(start_s, end_s, 0.0)
        spent[name] = curve.at(end_s) - curve.at(start_s)
    return spent


def multiply(seconds: float, a: torch.Tensor, b: torch.Tensor) -> None:
    """Matrix products for so long, never more than a few under way."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(4):
            torch.matmul(a, b)
        torch.cuda.synchronize()


def test_the_counter_rises_with_work_and_agrees_with_power(
    meters: dict[str, EnergyMeter], save: Callable[[str, dict[str, Any]], None]
) -> None:
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    windows = {}
    for name, spend in (("idle", time.sleep), ("matmul", lambda s: multiply(s, a, b))):
        spend(SETTLE_S)
        start_s = time.monotonic()
        spend(WINDOW_S)
        windows[name] = joules(meters, start_s, time.monotonic())
    record: dict[str, Any] = {"window_s": WINDOW_S, "matmul_size": SIZE, "joules": windows}
    record["counter_over_power"] = windows["matmul"]["counter"] / windows["matmul"]["power"]
    save("energy", {"figures": record})
    assert windows["idle"]["counter"] >= 0
    assert windows["matmul"]["counter"] > windows["idle"]["counter"]
    assert record["counter_over_power"] == pytest.approx(1.0, abs=0.15)
