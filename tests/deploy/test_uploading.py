"""Runs at a URL: what goes there, what a store that fails does to a run, and what comes back."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from deploy.uploading import Uploader, bring
from services.config.schema import ClusterConfig
from services.core.checkpoints import step_folder, whole_checkpoints
from services.core.errors import ConfigError, DataError, WaitTimeoutError
from services.core.types import EvalResult
from services.report.records import read_lines
from services.report.remote import COMPLETE, RemoteRun, open_place
from services.report.run_folder import RunFolder
from tests.services.report.conftest import drive_step

RUN = "night"
PATIENCE_S = 60.0
QUICK = (0.01, 0.05, 0.02)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/far away/runs"
        return
    place = f"/longtail-{uuid.uuid4().hex}"
    yield f"memory:/{place}"
    memory = fsspec.filesystem("memory")
    if memory.exists(place):
        memory.rm(place, recursive=True)


def opened(place: Path, **run: Any) -> RunFolder:
    return RunFolder(ClusterConfig.model_validate({"run": {"dir": str(place), "id": RUN, "steps": 9, **run}}))


def record(folder: RunFolder, *steps: int) -> None:
    """Steps with rollouts and, as the policy trainer writes them behind that, checkpoints."""
    for step in steps:
        drive_step(folder, random.Random(step), step, 10.0 * step, 2)
        place = step_folder(folder.checkpoints, step)
        place.mkdir(parents=True)
        (place / "state.safetensors").write_bytes(bytes([step]) * 3000)
        (place / "manifest.json").write_text(json.dumps({"step": step}))


def until(what: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < give_up_s, "it did not come to that"
        time.sleep(0.01)


def uploader(folder: RunFolder, url: str, after_step: int = 0, remote: RemoteRun | None = None) -> Uploader:
    return Uploader(folder, remote or RemoteRun(url, RUN), after_step, lambda: 7.0, QUICK)


def uploaded(folder: RunFolder, url: str, *steps: int) -> None:
    """One after the other, each seen through."""
    for step in steps:
        record(folder, step)
        up = uploader(folder, url, step - 1)
        up.close(PATIENCE_S)


def told(folder: RunFolder, kind: str) -> list[str]:
    return [row["message"] for row in read_lines(folder.path / "events.jsonl")[0] if row["kind"] == kind]


# ---------------------------------------------------------------------------- there and back


def test_a_run_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    folder = opened(tmp_path / "runs")
    record(folder, 1, 2)
    (folder.path / "summary.json").write_text("{}")
    uploader(folder, url).close(PATIENCE_S)
    assert RemoteRun(url, RUN).steps() == [2] and "step 2 is at " in told(folder, "uploaded")[0]
    fs, root = open_place(url)
    assert fs.cat_file(f"{root}/{RUN}/summary.json") == b"{}", "what people want to see is there, too"

    said: list[str] = []
    there = tmp_path / "another machine"
    assert bring(url, RUN, there, said.append) and "step 2 came from" in said[0]
    needed = {"config.yaml", "run.json", "metrics.jsonl", "events.jsonl", "spans.jsonl", "strategies.jsonl"}
    found = {str(f.relative_to(there / RUN)) for f in (there / RUN).rglob("*") if f.is_file()}
    rollouts = {f"rollouts/step_0000{n}.parquet" for n in (1, 2)}
    place = "checkpoints/step-0000000002"
    assert found == needed | rollouts | {f"{place}/state.safetensors", f"{place}/manifest.json"}
    own = [p for p in found if not p.startswith("events")]  # which has grown since
    assert all((there / RUN / path).read_bytes() == (folder.path / path).read_bytes() for path in own)
    assert [p.name for p in there.iterdir()] == [RUN], "nothing else is left"
    folder.close()
    again = opened(there)
    assert again.reopened and again.recorded_step() == 2
    again.close()


def test_what_is_not_recorded_stays_here(url: str, tmp_path: Path) -> None:
    """A run could not go on from it: the driver may die before it tells the step."""
    folder = opened(tmp_path)
    record(folder, 1, 2)
    (folder.path / "rollouts" / "step_00002.parquet").unlink()
    uploader(folder, url).close(PATIENCE_S)
    assert RemoteRun(url, RUN).steps() == [1]


def test_rollouts_are_uploaded_once_and_checkpoints_stay_as_here(url: str, tmp_path: Path) -> None:
    folder = opened(tmp_path, keep_last=2, keep_best=1)
    folder.evaluation(EvalResult(2, 1.0, 4, 4, 0.9, 0.9))
    puts: list[str] = []

    class Counting(RemoteRun):
        def _put(self, folder: Path, path: str, at: str) -> Any:
            puts.append(at)
            return super()._put(folder, path, at)

    up = uploader(folder, url, remote=Counting(url, RUN))
    remote = RemoteRun(url, RUN)
    for step in range(1, 6):
        record(folder, step)
        until(lambda step=step: step in remote.steps() and up._done == step)  # type: ignore[misc]
    up.close(PATIENCE_S)
    assert remote.steps() == [2, 4, 5]
    assert [at for at in puts if at.startswith("rollouts/")] == [f"rollouts/step_0000{n}.parquet" for n in range(1, 6)]
    fs, root = open_place(url)
    places = sorted(p.rpartition("/")[2] for p in fs.ls(f"{root}/{RUN}", detail=False))
    assert places == ["rollouts", *(f"step-000000000{n}" for n in (2, 4, 5))], "nothing half gone is left"


def test_steps_that_are_done_again_make_way(url: str, tmp_path: Path) -> None:
    folder = opened(tmp_path / "here", keep_last=9)
    record(folder, 1, 2, 3)
    for step in (1, 2, 3):
        RemoteRun(url, RUN).store(step, folder.path, {})
    folder.close()
    again = opened(tmp_path / "here", keep_last=9)
    again.rewind(1)
    record(again, 2)
    puts: list[str] = []

    class Counting(RemoteRun):
        def _put(self, folder: Path, path: str, at: str) -> Any:
            puts.append(at)
            return super()._put(folder, path, at)

    uploader(again, url, 1, Counting(url, RUN)).close(PATIENCE_S)
    assert RemoteRun(url, RUN).steps() == [1, 2], "step 3 is of another future"
    assert [at for at in puts if at.startswith("rollouts/")] == ["rollouts/step_00002.parquet"]
    assert bring(url, RUN, tmp_path / "there", lambda line: None)
    again.close()


# ---------------------------------------------------------------------------- stores that fail


class Failing(RemoteRun):
    """Raises what no one expects, `left` times."""

    left = 3

    def store(self, step: int, folder: Path, known: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise KeyError("the bucket is in the wrong region")
        return super().store(step, folder, known)


def test_a_failure_is_told_once_and_tried_again(url: str, tmp_path: Path) -> None:
    folder = opened(tmp_path)
    record(folder, 1)
    uploader(folder, url, remote=Failing(url, RUN)).close(PATIENCE_S)
    (failed,) = told(folder, "upload_failed")
    assert "KeyError: 'the bucket is in the wrong region'; tried again in 0.01 s" in failed
    assert len(told(folder, "uploaded")) == 1 and RemoteRun(url, RUN).steps() == [1]


def test_a_store_that_hangs_holds_up_nothing_but_the_end(tmp_path: Path) -> None:
    release = threading.Event()

    class Hanging(RemoteRun):
        def store(self, step: int, folder: Path, known: Any) -> Any:
            release.wait(PATIENCE_S)
            return super().store(step, folder, known)

    url = f"file://{tmp_path}/far"
    folder = opened(tmp_path / "runs", keep_last=1)
    up = uploader(folder, url, remote=Hanging(url, RUN))
    record(folder, 1)
    until(lambda: folder.held == 1)
    record(folder, 2, 3)  # returns at once
    kept = [p.name for p in whole_checkpoints(folder.checkpoints)]
    assert kept[0] == "step-0000000001", "the one that is being uploaded stays, whatever keep_last says"
    late = (
        r"night was not uploaded to file://.*/far/night to its end within run.upload_timeout_s = 0.2 s: step 0 is there"
    )
    with pytest.raises(WaitTimeoutError, match=rf"{late}; an upload is under way.*copy it by hand"):
        up.close(0.2)
    release.set()


def test_the_end_says_what_failed_last(url: str, tmp_path: Path) -> None:
    class Never(Failing):
        left = 10**9

    folder = opened(tmp_path)
    record(folder, 1)
    with pytest.raises(WaitTimeoutError, match="the last attempt failed: KeyError: 'the bucket is in the wrong"):
        uploader(folder, url, remote=Never(url, RUN)).close(0.5)


# ---------------------------------------------------------------------------- what is damaged, and what is in the way


@pytest.mark.parametrize("damage", ["incomplete", "cut", "changed", "missing", "nonsense"])
def test_only_whole_steps_are_believed(url: str, tmp_path: Path, damage: str) -> None:
    folder = opened(tmp_path / "here", keep_last=9)
    record(folder, 1, 2)
    remote = RemoteRun(url, RUN)
    for step in (1, 2):
        remote.store(step, folder.path, {})
    fs, root = open_place(url)
    place = f"{root}/{RUN}/step-0000000002"
    state = f"{place}/checkpoints/step-0000000002/state.safetensors"
    if damage == "incomplete":  # the writer was killed
        fs.rm_file(f"{place}/{COMPLETE}")
    elif damage == "nonsense":
        fs.pipe_file(f"{place}/{COMPLETE}", b"{")
    elif damage == "missing":
        fs.rm_file(state)
    else:
        fs.pipe_file(state, b"\2" * 2999 + (b"" if damage == "cut" else b"\3"))
    said: list[str] = []
    assert bring(url, RUN, tmp_path / "there", said.append)
    assert "step 1 came from" in said[-1] and len(said) == (1 if damage == "incomplete" else 2)
    assert [p.name for p in whole_checkpoints(tmp_path / "there" / RUN / "checkpoints")] == ["step-0000000001"]
    fs.rm_file(f"{root}/{RUN}/rollouts/step_00001.parquet")
    with pytest.raises(DataError, match="can be gone on from"):
        bring(url, RUN, tmp_path / "elsewhere", said.append)
    assert not (tmp_path / "elsewhere" / RUN).exists()


def test_a_path_that_leads_out_of_the_folder_is_refused(url: str, tmp_path: Path) -> None:
    folder = opened(tmp_path / "here")
    record(folder, 1)
    RemoteRun(url, RUN).store(1, folder.path, {})
    fs, root = open_place(url)
    complete = f"{root}/{RUN}/step-0000000001/{COMPLETE}"
    about = json.loads(fs.cat_file(complete))
    about["files"][0]["path"] = "../../evil"
    fs.pipe_file(complete, json.dumps(about).encode())
    with pytest.raises(DataError, match="outside of a run folder"):
        bring(url, RUN, tmp_path / "there" / "runs", lambda line: None)
    assert not list(tmp_path.rglob("evil"))


def test_a_folder_that_is_there_is_kept(url: str, tmp_path: Path) -> None:
    folder = opened(tmp_path / "here", keep_last=9)
    record(folder, 1)
    assert not bring(url, RUN, tmp_path / "here", lambda line: None), "nothing is at the URL"
    RemoteRun(url, RUN).store(1, folder.path, {})
    assert not bring(url, RUN, tmp_path / "here", lambda line: None), "nothing newer is"
    record(folder, 2)
    RemoteRun(url, RUN).store(2, folder.path, {})
    assert bring(url, RUN, tmp_path / "there", lambda line: None)
    folder.rewind(1)
    with pytest.raises(ConfigError, match=r"has step 1, .* step 2: move the folder away .*, or leave"):
        bring(url, RUN, tmp_path / "here", lambda line: None)


def test_a_url_that_cannot_be_opened_is_told() -> None:
    with pytest.raises(ConfigError, match=r"nonsense://x cannot be opened: .*s3://.*are usual"):
        RemoteRun("nonsense://x", RUN)
    with pytest.raises(DataError, match="cannot be read"):
        bring("http://127.0.0.1:9/runs", RUN, Path("nowhere"), lambda line: None)
