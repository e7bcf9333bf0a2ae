"""progress.json: always whole, the newest view within a second or so, signs of life while nothing is new."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.core.types import ControlState, ProgressView
from services.report import progress_file
from services.report.progress_file import ProgressFile


def view(step: int, phase: str = "rollout") -> ProgressView:
    slots = {"slot 0": "rollout"}
    return ProgressView(phase, step, 9, 1, 2, 1, 5.0, None, None, None, 0, 0, slots, control=ControlState(True, "off"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "it did not come true"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_file, "WRITE_S", 0.1)
    monkeypatch.setattr(progress_file, "ALIVE_S", 0.3)
    monkeypatch.setattr(progress_file.LOG, "disabled", False)  # libraries that configure logging disable what is there


def test_the_newest_view_arrives_although_none_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    written, began = ProgressFile(path), time.time()
    for step in range(500):
        written.offer(view(step))
    wait_until(lambda: path.exists() and read(path)["step"] == 499)
    row = read(path)
    assert row["control"] == {"paused": True, "forced": "off"} and row["slots"] == {"slot 0": "rollout"}
    assert began - 0.001 <= row["viewed_at"] <= time.time() + 0.001, "rounded to milliseconds"
    written.close()


def test_a_quiet_run_gives_signs_of_life_and_a_closed_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    written = ProgressFile(path)
    written.offer(view(1))
    wait_until(path.exists)
    first = read(path)
    wait_until(lambda: read(path)["alive_at"] > first["alive_at"])
    assert read(path)["viewed_at"] == first["viewed_at"]
    written.offer(view(2, "finished"))
    written.close()
    last = read(path)
    assert (last["step"], last["phase"]) == (2, "finished")
    time.sleep(0.5)
    assert read(path) == last


def test_views_are_written_at_most_once_per_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[float] = []
    real = progress_file.write_atomic

    def counted(path: Path, text: str) -> None:
        if path.is_relative_to(tmp_path):  # threads of the tests before this one show signs of life
            writes.append(time.monotonic())
        real(path, text)

    monkeypatch.setattr(progress_file, "write_atomic", counted)
    written = ProgressFile(tmp_path / "progress.json")
    began = time.monotonic()
    while time.monotonic() < began + 0.55:
        written.offer(view(1))
    written.close()
    took = time.monotonic() - began
    assert 2 <= len(writes) <= 2 + took / 0.1, "the first, one for each interval, and the last"


def test_a_folder_that_vanished_is_told_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        written = ProgressFile(tmp_path / "gone" / "progress.json")
        written.offer(view(1))
        wait_until(lambda: "cannot be written" in caplog.text)
    written.offer(view(2))
    written.close()


def test_closing_what_never_began_is_nothing(tmp_path: Path) -> None:
    ProgressFile(tmp_path / "progress.json").close()
    assert not list(tmp_path.iterdir())
