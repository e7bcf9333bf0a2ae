"""A growing file of JSON lines, read a little further each time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

T = TypeVar("T", bound=BaseModel)

READ_BYTES = 8 * 2**20  # in one look; the rest is there at the next


class LineTail(Generic[T]):
    """`rows` only grows, so what was sliced from it stays right while another thread reads on; `kind` picks among the
    lines of a file that has several. A line that is no `T` is counted, not shown."""

    def __init__(self, path: Path, model: type[T], kind: str | None = None) -> None:
        self._path, self._model, self._kind = path, model, kind
        self._offset, self._inode = 0, 0
        self.rows: list[T] = []
        self.bad = 0

    def read_on(self) -> bool:
        """Take what was appended. False: the file is another one than before, or shorter, as when a run went back to a
        checkpoint; start with a new LineTail."""
        try:
            with open(self._path, "rb") as file:
                about = os.fstat(file.fileno())
                if self._inode not in (0, about.st_ino) or about.st_size < self._offset:
                    return False
                self._inode = about.st_ino
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return self._offset == 0
        whole, newline, _ = data.rpartition(b"\n")
        if newline:  # a line without its end is still being written
            self._offset += len(whole) + 1
            for line in whole.split(b"\n"):
                self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            row = json.loads(line)
            if self._kind is None or row.get("kind") == self._kind:
                self.rows.append(self._model.model_validate(row))
        except (ValueError, AttributeError, ValidationError):  # not JSON, not UTF-8, no object, not such a row
            self.bad += 1
