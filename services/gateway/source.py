"""Where runs come from: a protocol, and a folder of run folders behind it."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.core.errors import ConfigError, UnknownRunError
from services.gateway.lengths import NONE, read_lengths
from services.gateway.run_reader import ENDED, RunReader, RunSnapshot, modified_ns, read_entry
from services.gateway.schema import Lengths, RunEntry

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}")
KEPT_RUNS = 8  # whose rows stay in memory


class RunSource(Protocol):
    """Every call reads files and may block; calls may come from any thread."""

    def runs(self) -> list[RunEntry]:
        """Newest first."""

    def run(self, run_id: str) -> RunSnapshot:
        """Raises UnknownRunError."""

    def lengths(self, run: RunSnapshot, step: int | None) -> Lengths:
        """Of one step, or of the last that has any."""

    def report(self, run: RunSnapshot) -> bytes | None:
        """report.html; None before there is one."""


class FolderSource:
    """The run folders in `root`. Raises ConfigError when that is no folder.

    A run id never becomes part of a path: it is looked up among the names that the folder really has. Links are passed
    over, because they may lead anywhere.
    """

    def __init__(self, root: Path, now: Callable[[], float] = time.time) -> None:
        if not root.is_dir():
            raise ConfigError(f"{root} is no folder: name the one that holds run folders (run.dir of the runs)")
        self._root, self._now, self._lock = root, now, threading.Lock()
        self._readers: dict[str, RunReader] = {}
        self._ended: dict[str, tuple[int, RunEntry]] = {}  # with the time of its summary.json

    def runs(self) -> list[RunEntry]:
        entries = [self._entry(path) for path in self._folders().values()]
        return sorted(entries, key=lambda e: (e.started_at, e.run_id), reverse=True)

    def run(self, run_id: str) -> RunSnapshot:
        path = self._folders().get(run_id)
        if path is None:
            raise UnknownRunError(f"there is no run {run_id!r} here: /api/v1/runs lists those that there are")
        with self._lock:
            reader = self._readers.pop(run_id, None) or RunReader(path)
            self._readers[run_id] = reader  # now the newest
            for oldest in list(self._readers)[:-KEPT_RUNS]:
                del self._readers[oldest]
            return reader.read(self._now())

    def lengths(self, run: RunSnapshot, step: int | None) -> Lengths:
        last = [s.step for s in run.steps[max(0, run.detail.num_steps_done - 3) : run.detail.num_steps_done]]
        for wanted in reversed(last) if step is None else (step,):  # the newest step's file may be a moment late
            found = read_lengths(run.path / "rollouts", wanted)
            if found is not None:
                return found
        return NONE

    def report(self, run: RunSnapshot) -> bytes | None:
        try:
            return (run.path / "report.html").read_bytes()
        except FileNotFoundError:
            return None

    def _entry(self, path: Path) -> RunEntry:
        """A run that has ended is read once: there may be thousands."""
        written = modified_ns(path / "summary.json")
        known = self._ended.get(path.name)
        if known is not None and known[0] == written:
            return known[1]
        entry = read_entry(path, self._now())[0]
        if entry.status in ENDED:
            self._ended[path.name] = (written, entry)
        return entry

    def _folders(self) -> dict[str, Path]:
        with os.scandir(self._root) as entries:
            return {
                entry.name: Path(entry.path)
                for entry in entries
                if RUN_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                and os.path.isfile(os.path.join(entry.path, "config.yaml"))
            }  # fmt: skip
