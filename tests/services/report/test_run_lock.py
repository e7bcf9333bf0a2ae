"""One driver per run folder, whatever happened to the one before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.core.errors import ConfigError
from services.report import run_lock
from services.report.run_lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from services.report.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(120)
"""


def skip(seconds: float) -> None:
    time.sleep(0.001)


def holder(folder: Path) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_driver_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=rf"is being driven by process {os.getpid()} on .*another run\.id"):
        RunLock(tmp_path, skip)
    first.release()
    RunLock(tmp_path, skip).release()


def test_a_driver_that_was_killed_leaves_the_folder_free(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} "):
            RunLock(tmp_path, skip)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(120)
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == process.pid, "it could not clean up"
    RunLock(tmp_path, skip).release()


@pytest.mark.parametrize("beats", [True, False])
def test_a_driver_on_another_machine_is_known_by_its_heartbeat(
    tmp_path: Path, beats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system does not carry the kernel's lock from machine to machine."""
    file = tmp_path / "lock.json"
    file.write_text(json.dumps({"host": "elsewhere pid:[1]", "pid": 7}))
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        if beats and slept > 3:
            os.utime(file, ns=(1, 1))

    if beats:
        with pytest.raises(ConfigError, match="driven by process 7 on elsewhere:"):
            RunLock(tmp_path, sleep)
    else:
        RunLock(tmp_path, sleep).release()
        assert slept >= run_lock.SILENT_S


def test_the_holder_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.02)
    lock = RunLock(tmp_path)
    os.utime(tmp_path / "lock.json", ns=(1, 1))
    give_up_s = time.monotonic() + 60
    while (tmp_path / "lock.json").stat().st_mtime_ns == 1:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    lock.release()
    lock.release()  # changes nothing


def test_a_holder_that_died_while_it_wrote_its_name_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text('{"host": "h')
    RunLock(tmp_path, skip).release()
