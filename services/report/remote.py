"""Runs at a URL: checkpoints and records of a run where any machine finds them.

    URL/RUN_ID/rollouts/step_00001.parquet        each once, whatever checkpoint needs it
    URL/RUN_ID/step-0000000004/...                the run folder's records at that time, and its checkpoint
    URL/RUN_ID/step-0000000004/complete.json      last: every file of the run folder up to there, with size and SHA-256

A step without its `complete.json` is not there. What takes a step away removes that file first, so that no reader
believes what is half gone. `URL` is whatever fsspec opens (s3://, gs://, abfs://, file:// ...), or else pyarrow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FileSystem

from services.core.checkpoints import step_folder, step_number
from services.core.errors import ConfigError, DataError
from services.core.files import sha256_of
from services.report.history import CHECKPOINTS, EVENTS, METRICS, ROLLOUTS, SPANS, STRATEGIES

COMPLETE = "complete.json"
FORMAT = 1
RECORDS = ("config.yaml", "run.json", METRICS, EVENTS, SPANS, STRATEGIES, "metrics_values.json")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """`path` in the run folder, `at` below the run's URL."""

    path: str
    at: str
    bytes: int
    sha256: str


def open_place(url: str) -> tuple[Any, str]:
    """(file system, path in it). Raises ConfigError for a URL that cannot be opened."""
    if url.startswith(("file://", "local://")):
        return LocalFileSystem(auto_mkdir=True), LocalFileSystem._strip_protocol(url)
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found
    except ValueError as error:
        raise ConfigError(f"{url} cannot be opened: {error}; s3://, gs://, abfs:// or file:// are usual") from None
    except ImportError as missing:
        return _by_pyarrow(url, missing)


def _by_pyarrow(url: str, missing: ImportError) -> tuple[Any, str]:
    try:
        system, path = FileSystem.from_uri(url)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url} cannot be opened: {missing}; nor by pyarrow: {error}") from None
    return ArrowFSWrapper(system), path


class RemoteRun:
    """One run at a URL. Errors are those of the file system; a caller that cannot wait keeps away from its thread."""

    def __init__(self, url: str, run_id: str) -> None:
        self._fs, root = open_place(url)
        self._root = f"{root.rstrip('/')}/{run_id}"
        self.url, self.run_id = f"{url.rstrip('/')}/{run_id}", run_id

    def steps(self) -> list[int]:
        """Those that are complete, oldest first."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        found = sorted(step for name in names if (step := step_number(name)) is not None)
        return [step for step in found if self._fs.exists(self._at(_complete(step)))]

    def files(self, step: int) -> list[StoredFile]:
        """Of a complete step. Raises DataError when what it says of itself cannot be read."""
        try:
            about = json.loads(self._fs.cat_file(self._at(_complete(step))))
            assert about["format"] == FORMAT
            return [StoredFile(**row) for row in about["files"]]
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise DataError(f"{self.url}/{_complete(step)} cannot be read ({type(error).__name__}: {error})") from None

    def store(self, step: int, folder: Path, known: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
        """Upload what a run needs to go on after `step`, from its `folder`; `known`: rollout files that are there
        already, by path. Returns the same of now."""
        rollouts = dict(known)
        for path in _rollouts_until(folder, step):
            if path not in rollouts:
                rollouts[path] = self._put(folder, path, path)
        place = step_folder(Path(), step).name
        checkpoint = sorted(f.name for f in (folder / CHECKPOINTS / place).iterdir())
        own = [name for name in RECORDS if (folder / name).is_file()]
        own += [f"{CHECKPOINTS}/{place}/{name}" for name in checkpoint]
        files = [*rollouts.values(), *(self._put(folder, path, f"{place}/{path}") for path in own)]
        about = {"format": FORMAT, "run_id": self.run_id, "step": step, "files": [asdict(f) for f in files]}
        self._fs.pipe_file(self._at(_complete(step)), json.dumps(about).encode())
        return rollouts

    def put_beside(self, folder: Path, paths: Iterable[str]) -> None:
        """Upload further files of the run folder, which no resumption needs."""
        for path in paths:
            self._put(folder, path, path)

    def remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._fs.rm_file(self._at(_complete(step)))
            self._fs.rm(self._at(_complete(step).rpartition("/")[0]), recursive=True)

    def fetch(self, step: int, folder: Path) -> None:
        """Write a complete step's files into `folder`. Raises DataError when one is not what was uploaded."""
        for file in self.files(step):
            target = folder / file.path
            if not target.resolve().is_relative_to(folder.resolve()):
                raise DataError(f"{self.url} names {file.path!r}, which is outside of a run folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(self._at(file.at), str(target))
            except FileNotFoundError:
                raise DataError(f"{self.url}/{file.at} is missing") from None
            if (target.stat().st_size, sha256_of(target)) != (file.bytes, file.sha256):
                raise DataError(f"{self.url}/{file.at} is not what was uploaded")

    def _put(self, folder: Path, path: str, at: str) -> StoredFile:
        """As it is now: a file that grows meanwhile is uploaded as far as it was read for its checksum."""
        source = folder / path
        if path.endswith((".jsonl", ".json", ".yaml")):
            data = source.read_bytes()
            self._fs.pipe_file(self._at(at), data)
            return StoredFile(path, at, len(data), hashlib.sha256(data).hexdigest())
        self._fs.put_file(str(source), self._at(at))
        return StoredFile(path, at, source.stat().st_size, sha256_of(source))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


def _complete(step: int) -> str:
    return f"{step_folder(Path(), step).name}/{COMPLETE}"


def _rollouts_until(folder: Path, step: int) -> Iterator[str]:
    for file in sorted((folder / ROLLOUTS).glob("step_*.parquet")):
        if int(file.stem.removeprefix("step_")) <= step:
            yield f"{ROLLOUTS}/{file.name}"
