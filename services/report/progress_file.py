"""`progress.json`: the newest view of a run, for readers in other processes.

    {"alive_at": ..., "viewed_at": ..., <fields of ProgressView>}    both times in seconds of Unix time

Views come many times a second from the run's own thread; one thread here writes the newest, at most once a second. It
also writes when nothing is new, so that a reader can tell a run in a long step (alive_at is fresh) from one that was
killed (it is not).
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from services.core.types import ProgressView
from services.report.records import to_json, to_row, write_atomic

WRITE_S = 1.0
ALIVE_S = 5.0  # the longest without a sign of life
LOG = logging.getLogger(__name__)


class ProgressFile:
    """`offer` and `close` may be called from any thread; the writing thread starts with the first view."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)  # of an earlier start of this run
        self._lock = threading.Lock()
        self._view: tuple[ProgressView, float] | None = None
        self._written: tuple[ProgressView, float] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def offer(self, view: ProgressView) -> None:
        with self._lock:
            self._view = (view, time.time())
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="progress-file", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Write the last view and end the thread."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10.0)

    def _run(self) -> None:
        next_sign_s = 0.0
        while True:
            ending = self._closing.is_set()
            view = self._view
            if view is not self._written or time.monotonic() >= next_sign_s:
                self._write(view)
                next_sign_s = time.monotonic() + ALIVE_S
            if ending:
                return
            self._closing.wait(WRITE_S)

    def _write(self, newest: tuple[ProgressView, float] | None) -> None:
        assert newest is not None, "the thread starts with a view"
        view, viewed_at = newest
        row = to_row(view, alive_at=round(time.time(), 3), viewed_at=round(viewed_at, 3))
        try:
            write_atomic(self._path, to_json(row) + "\n")
        except OSError as error:  # a full disk: what matters is written, or fails, elsewhere
            LOG.warning("%s cannot be written (%s): the live page shows what was there", self._path, error.strerror)
        else:
            self._written = newest
