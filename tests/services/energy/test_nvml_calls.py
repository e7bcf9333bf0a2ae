"""The NVML reader through the real bindings, over a driver library of three made-up GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("fake_nvml.c")

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the made-up driver with")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    build = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(build, check=True, timeout=60, capture_output=True)
    return folder


def told(driver: Path, code: str) -> Any:
    """What `code`, which ends in print(json), says in a process that finds the made-up driver first."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    head = "import json\nfrom services.energy.nvml import open_nvml\nfrom services.core.errors import MeterError\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_counter_is_in_joules_and_power_in_watts(driver: Path) -> None:
    code = (
        "reader = open_nvml(['0', 'GPU-1'])\n"
        "counter = [reader.read('GPU-000') for _ in range(3)]\n"
        "print(json.dumps([reader.entries, reader.methods, counter, reader.read('GPU-111')]))\n"
        "reader.close()\n"
    )
    entries, methods, counter, watts = told(driver, code)
    assert entries == {"0": "GPU-000", "GPU-1": "GPU-111"}
    assert methods == {"GPU-000": "counter", "GPU-111": "power"}
    assert [c - counter[0] for c in counter] == [0.0, 1.5, 3.0] and counter[0] == pytest.approx(5e9, rel=1e-6)
    assert watts == 70.251


def test_a_lost_gpu_is_an_error_that_names_it(driver: Path) -> None:
    code = (
        "reader = open_nvml(['2'])\n"
        "try:\n    reader.read('GPU-222')\n"
        "except MeterError as error:\n    print(json.dumps(str(error)))\n"
    )
    assert told(driver, code).startswith("GPU-222: NVML says")


def test_a_refused_entry_leaves_nvml_closed(driver: Path) -> None:
    code = (
        "import pynvml\n"
        "try:\n    open_nvml(['7'])\n"
        "except MeterError as error:\n    said = str(error)\n"
        "try:\n    pynvml.nvmlShutdown()\n    closed = False\n"
        "except pynvml.NVMLError_Uninitialized:\n    closed = True\n"
        "print(json.dumps([said, closed]))\n"
    )
    said, closed = told(driver, code)
    assert "'7' is not one of the 3" in said and closed


def test_the_service_reads_it_all_and_ends(driver: Path) -> None:
    code = (
        "import threading, time\nfrom services.energy.service import EnergyService\n"
        "service = EnergyService(['0', '1', '2'], open_nvml, time.monotonic)\n"
        "time.sleep(0.5)\n"
        "reading = service.read(None)\nservice.close()\n"
        "last = {g.uuid: g.joules[-1] if g.joules else None for g in reading.gpus}\n"
        "gpus = {g.uuid: [g.method, len(g.times_s), last[g.uuid], g.error] for g in reading.gpus}\n"
        "print(json.dumps([gpus, threading.active_count()]))\n"
    )
    gpus, threads = told(driver, code)
    assert threads == 1
    assert gpus["GPU-000"][0] == "counter" and gpus["GPU-000"][2] == 1.5 * (gpus["GPU-000"][1] - 1) > 0
    assert gpus["GPU-111"][0] == "power" and 70.25 * 0.45 < gpus["GPU-111"][2] < 70.25 * 5
    assert gpus["GPU-222"][1] == 0 and "GPU-222" in gpus["GPU-222"][3]
