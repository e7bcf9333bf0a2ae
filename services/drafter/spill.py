"""Hidden states on disk, for a drafter buffer that memory cannot hold: one safetensors file per sequence.

    ROOT/longtail-buffer-XXXXXXXX/lock        locked (flock) for as long as the process that made the folder lives
    ROOT/longtail-buffer-XXXXXXXX/00000042    sequence 42

Only its own process reads a folder, so checksums stay in memory. A process that was killed leaves its folder behind;
the next one to open ROOT removes every folder whose lock is free. Locks, not process ids: ids come again, and ROOT may
be seen from several containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import torch
from safetensors.torch import load, save

from services.core.errors import DataError
from services.models.hidden import HiddenStates

PREFIX, LOCK = "longtail-buffer-", "lock"
ATTEMPTS = 5


@dataclass(frozen=True)
class SpilledFile:
    """`num_bytes` on disk; `checksum` (CRC-32) of all of them."""

    path: Path
    num_bytes: int
    checksum: int
    policy_version: int


class SpillFolder:
    """A folder of this process under `root`, at most `max_bytes` in it. Gone with `close`, at the latest when the
    process ends by itself."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._count = 0
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_abandoned(root)
            self.folder, lock = _own_folder(root)
        except OSError as error:
            raise DataError(
                f"drafter.spill_dir {root} cannot be used: {error}; set one that this process may write to, or none"
            ) from None
        self._end = weakref.finalize(self, _remove, self.folder, lock)

    def write(self, content: bytes, policy_version: int) -> SpilledFile:
        """Whole or not at all. The caller has made room: more than `max_bytes` is a programmer's error. OSError when
        the disk does not take it."""
        assert self.num_bytes + len(content) <= self.max_bytes
        path = self.folder / f"{self._count:08d}"
        self._count += 1
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self.num_bytes += len(content)
        return SpilledFile(path, len(content), zlib.crc32(content), policy_version)

    def read(self, file: SpilledFile) -> HiddenStates:
        """DataError for a file that is missing or not what was written."""
        try:
            content = file.path.read_bytes()
        except OSError as error:
            raise DataError(f"spilled hidden states {file.path} cannot be read: {error}") from None
        if len(content) != file.num_bytes or zlib.crc32(content) != file.checksum:
            raise DataError(f"spilled hidden states {file.path} are not what was written: is the disk failing?")
        parts: dict[str, torch.Tensor] = load(content)
        return HiddenStates(
            parts["input_ids"], parts["hidden"], parts["loss_mask"], file.policy_version, parts.get("aux")
        )

    def remove(self, file: SpilledFile) -> None:
        """Also of one that is not there any more. The bytes of one that the disk will not let go still count."""
        try:
            file.path.unlink(missing_ok=True)
        except OSError:
            return
        self.num_bytes -= file.num_bytes

    def close(self) -> None:
        """Removes the folder; twice is no harm."""
        self._end()


def encode(states: HiddenStates) -> bytes:
    """The content of a sequence's file."""
    parts = {"input_ids": states.input_ids, "hidden": states.hidden, "loss_mask": states.loss_mask}
    if states.aux is not None:
        parts["aux"] = states.aux
    return save({name: t.detach().cpu().contiguous() for name, t in parts.items()})


def remove_abandoned(root: Path) -> list[Path]:
    """Folders whose process is dead, now removed. Those of living ones are left alone, and so is what is not ours."""
    removed = []
    for folder in sorted(root.glob(f"{PREFIX}*")):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except FileNotFoundError:  # its process died before it had a lock, or another one cleans: empty, or not ours
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        except OSError:
            continue  # a file, or another user's
        if _locked(lock):
            _remove(folder, lock)
            removed.append(folder)
        else:
            os.close(lock)
    return removed


def _own_folder(root: Path) -> tuple[Path, int]:
    """A new folder and its lock's descriptor. A cleaner may take the folder between its making and its locking: then
    another one is made."""
    for _ in range(ATTEMPTS):
        folder = root / f"{PREFIX}{token_hex(4)}"
        folder.mkdir()
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue
        if _locked(lock) and (folder / LOCK).exists():
            return folder, lock
        os.close(lock)
    raise OSError(f"{ATTEMPTS} new folders were removed by others at once")


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
