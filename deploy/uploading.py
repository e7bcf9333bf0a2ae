"""Copies a run's checkpoints and records to `run.checkpoint_url` while it runs, and brings them back.

Nobody waits for an upload but the end of the run. Each attempt runs in a thread of its own, so that whatever a store
raises is a value here, and one that hangs holds up nothing; what fails is told and tried again. The driver does it,
since it writes the records: a checkpoint goes out once the records reach it, so a run can go on from what is there.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pebble import concurrent

from deploy.resuming import Start
from services.config.schema import ClusterConfig
from services.core.checkpoints import step_of, whole_checkpoints
from services.core.errors import ConfigError, DataError, LongtailError, WaitTimeoutError
from services.core.types import RunEvent
from services.report.history import CHECKPOINTS
from services.report.remote import RemoteRun, StoredFile
from services.report.run_folder import RunFolder

PAUSES_S = (1.0, 60.0, 1.0)
BESIDE = ("summary.json", "trace.json", "report.html", "drafter/config.json", "drafter/model.safetensors")


class Uploader:
    """`after_step`: the step that the run goes on after; what is at the URL of later ones is taken away. `now`: seconds
    since the run began, for events. `pauses_s`: the first and the longest between attempts, each twice the one before,
    and the one between two looks for a new checkpoint."""

    def __init__(
        self,
        folder: RunFolder,
        remote: RemoteRun,
        after_step: int,
        now: Callable[[], float],
        pauses_s: tuple[float, float, float] = PAUSES_S,
    ) -> None:
        self._folder, self._remote, self._after_step, self._now = folder, remote, after_step, now
        self._first_pause_s, self._longest_pause_s, self._look_s = pauses_s
        self._rollouts: dict[str, StoredFile] | None = None  # those that are there; None: nobody has looked
        self._done, self._all_done = 0, False  # the last step that is there, and what comes at the end
        self._error = ""
        self._closing, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Wait until everything is there. Raises WaitTimeoutError."""
        self._closing.set()
        self._thread.join(timeout_s)
        self._over.set()
        if self._thread.is_alive():
            cause = self._error or "an upload is under way"
            raise WaitTimeoutError(
                f"run {self._remote.run_id} was not uploaded to {self._remote.url} to its end within "
                f"run.upload_timeout_s = {timeout_s:g} s: step {self._done} is there; {cause}. All of it is in "
                f"{self._folder.path}: copy it by hand, or give it more time"
            )

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while not self._over.is_set():
            job = self._job()
            if job is None:
                if self._closing.is_set():
                    return
                self._closing.wait(self._look_s)
                continue
            error = _under_way(job).exception()
            if error is None:
                pause_s, self._error = self._first_pause_s, ""
                continue
            self._tell_failure(error, pause_s)
            self._over.wait(pause_s)
            pause_s = min(2 * pause_s, self._longest_pause_s)

    def _job(self) -> Callable[[], None] | None:
        step = self._newest()
        if step is not None:
            return partial(self._store, step)
        return self._store_rest if self._closing.is_set() and not self._all_done else None

    def _newest(self) -> int | None:
        """The newest checkpoint that the records reach and that is not there yet."""
        steps = [n for n in map(step_of, whole_checkpoints(self._folder.checkpoints)) if n > self._done]
        recorded = self._folder.recorded_step() if steps else 0  # reads all of the metrics
        return max((step for step in steps if step <= recorded), default=None)

    def _store(self, step: int) -> None:
        started = time.monotonic()
        if self._rollouts is None:
            self._rollouts = self._look()
        self._folder.held = step
        try:
            self._rollouts = self._remote.store(step, self._folder.path, self._rollouts)
        finally:
            self._folder.held = None
        self._done = step
        self._remote.remove(self._folder.superseded(self._remote.steps(), step))
        self._tell("uploaded", f"step {step} is at {self._remote.url}, after {time.monotonic() - started:.1f} s")

    def _look(self) -> dict[str, StoredFile]:
        """The rollout files that are there. What is there of steps that are done again goes."""
        steps = self._remote.steps()
        self._remote.remove(step for step in steps if step > self._after_step)
        before = [step for step in steps if step <= self._after_step]
        files = self._remote.files(before[-1]) if before else []
        return {f.path: f for f in files if f.path == f.at}

    def _store_rest(self) -> None:
        found = [path for path in BESIDE if (self._folder.path / path).is_file()]
        self._remote.put_beside(self._folder.path, found)
        self._all_done = True

    def _tell_failure(self, error: BaseException, pause_s: float) -> None:
        """Once, until something succeeds again."""
        first, self._error = not self._error, f"the last attempt failed: {type(error).__name__}: {error}"
        if first:
            message = f"{self._remote.url}: {type(error).__name__}: {error}; tried again in {pause_s:g} s, and so on"
            self._tell("upload_failed", message)

    def _tell(self, kind: str, message: str) -> None:
        self._folder.event(RunEvent(self._now(), kind, "run", message))


@contextmanager
def uploading(config: ClusterConfig, folder: RunFolder, start: Start, say: Callable[[str], None]) -> Iterator[None]:
    """Upload while the block runs, and see it through at the end. An error of the block is not hidden by one here."""
    if config.run.checkpoint_url is None:
        yield
        return
    begun = time.monotonic() - (start.takeover.elapsed_s if start.takeover else 0.0)
    place = start.checkpoints.start if start.checkpoints else None
    after_step = 0 if place is None else step_of(place)
    remote = RemoteRun(config.run.checkpoint_url, folder.run_id)
    uploader = Uploader(folder, remote, after_step, lambda: time.monotonic() - begun)
    try:
        yield
    except BaseException:
        with suppress(WaitTimeoutError):
            uploader.close(config.run.upload_timeout_s)
        raise
    say(f"uploading the rest to {remote.url}, for at most {config.run.upload_timeout_s:g} s")
    uploader.close(config.run.upload_timeout_s)


def bring(url: str, run_id: str, runs_dir: Path, say: Callable[[str], None]) -> bool:
    """Make the run's folder under `runs_dir` from the newest whole step at `url`; False when the folder is there, or
    nothing at the URL. Raises ConfigError when the folder is behind the URL, DataError when nothing there can be read.
    """
    remote, folder = RemoteRun(url, run_id), runs_dir / run_id
    steps = _asked(remote, remote.steps)
    if (folder / "config.yaml").is_file():
        own = max(map(step_of, whole_checkpoints(folder / CHECKPOINTS)), default=0)
        if steps and steps[-1] > own:
            raise ConfigError(
                f"{folder} has step {own}, {remote.url} step {steps[-1]}: move the folder away to go on from the URL, "
                "or leave run.checkpoint_url out to go on from the folder"
            )
        return False
    failed = ""
    for step in reversed(steps):
        try:
            _asked(remote, partial(_fetch, remote, step, folder))
        except DataError as error:
            failed = str(error)
            say(f"{failed}: trying the step before")
            continue
        say(f"step {step} came from {remote.url}")
        return True
    if failed:
        raise DataError(f"no step at {remote.url} can be gone on from: {failed}")
    return False


def _fetch(remote: RemoteRun, step: int, folder: Path) -> None:
    """Whole or not at all."""
    partly = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        remote.fetch(step, partly)
        partly.rename(folder)
    finally:
        shutil.rmtree(partly, ignore_errors=True)


def _asked(remote: RemoteRun, job: Callable[[], Any]) -> Any:
    """The job's result. Whatever a store raises becomes DataError."""
    future = _under_way(job)
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, LongtailError):
        raise error
    raise DataError(
        f"{remote.url} cannot be read ({type(error).__name__}: {error}): check the URL and the credentials"
    ) from error


def _under_way(job: Callable[[], Any]) -> Future[Any]:
    """In a thread of its own, which dies with the process."""
    future: Future[Any] = concurrent.thread(job)()
    return future
