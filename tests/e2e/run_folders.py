"""Reading a run folder that is still being written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class WatchedRun:
    """`alive`: whether whoever writes the folder is; when it is not, reading fails with the text of `log`."""

    def __init__(self, folder: Path, alive: Callable[[], bool], log: Path) -> None:
        self._folder, self._alive, self._log = folder, alive, log

    def rows(self, file: str) -> list[dict[str, Any]]:
        path = self._folder / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> int:
        assert self._alive(), self._log.read_text()
        return len(self.step_numbers())

    def step_numbers(self) -> list[int]:
        return [row["step"] for row in self.rows("metrics.jsonl") if row["kind"] == "step"]

    def kinds(self) -> set[str]:
        return {row["kind"] for row in self.rows("events.jsonl")}

    def subjects(self, kind: str) -> list[str]:
        assert self._alive(), self._log.read_text()
        return [row["subject"] for row in self.rows("events.jsonl") if row["kind"] == kind]
