"""One driver at a time on a run folder.

The lock is the kernel's (`flock`), which lets go of it when the driver dies, however it dies. File systems that do not
carry such locks between machines are covered by a heartbeat: a driver on another machine counts as alive while its file
is still being touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.core.errors import ConfigError

HEARTBEAT_S = 2.0
SILENT_S = 10.0  # a driver elsewhere that has not touched its file for so long is dead
GRACE_S = 5.0  # of one that was killed: the kernel may need a moment, and so do processes it started


class RunLock:
    """Held from construction to `release`. Raises ConfigError when another driver has the folder."""

    def __init__(self, folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        self._path = folder / "lock.json"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take(sleep)
            self._await_silence(sleep)
        except BaseException:
            os.close(self._file)
            raise
        self._write({"host": _machine(), "pid": os.getpid()})
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="run-lock", daemon=True).start()

    def release(self) -> None:
        """Let another driver have the folder; a second call changes nothing."""
        if not self._released.is_set():
            self._released.set()
            self._write({})
            os.close(self._file)

    def _take(self, sleep: Callable[[float], None]) -> None:
        waited_s = 0.0
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waited_s >= GRACE_S:
                    raise self._refused() from None
            else:
                return
            sleep(0.25)
            waited_s += 0.25

    def _await_silence(self, sleep: Callable[[float], None]) -> None:
        """The kernel gave us the lock. A holder on this machine is dead then, one elsewhere perhaps out of sight."""
        holder = self._holder()
        if not holder or holder.get("host") == _machine():
            return
        touched, silent_s = self._touched(), 0.0
        while silent_s < SILENT_S:
            sleep(HEARTBEAT_S / 2)
            silent_s += HEARTBEAT_S / 2
            if self._touched() != touched:
                raise self._refused()

    def _refused(self) -> ConfigError:
        holder = self._holder()
        who = f"process {holder.get('pid')} on {str(holder.get('host')).partition(' ')[0]}" if holder else "a process"
        return ConfigError(
            f"run {self._path.parent.name} is being driven by {who}: wait for it, stop it, or set another run.id"
        )

    def _holder(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8") or "{}")
        except json.JSONDecodeError:
            return {}  # its holder died while it wrote
        return found if isinstance(found, dict) else {}

    def _touched(self) -> int:
        return self._path.stat().st_mtime_ns

    def _write(self, holder: dict[str, Any]) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(holder).encode(), 0)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            try:
                os.utime(self._path)
            except FileNotFoundError:
                return  # the run folder was removed under a driver that still runs: its next write says so


def _machine() -> str:
    """This machine, and of it this container: the same process id elsewhere is another process."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
