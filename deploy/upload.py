"""What `longtail submit` sends to the cluster: the working folder without what no job needs, as one archive.

Ray packs a folder by itself, too, but tells neither how large it is nor why, and refuses it only at the end (pitfall
67).
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.core.errors import ConfigError

# Folders by name, wherever they are.
LEFT_OUT = (
    ".git", ".venv", "venv", "node_modules", "__pycache__", "runs", "checkpoints", "build", "dist", "*.egg-info",
    ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis",
)  # fmt: skip
LIMIT_BYTES = 100 * 2**20  # the head keeps every version that it was sent
MIB = 2**20
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # equal files make equal archives, which Ray keeps once


@dataclass(frozen=True, slots=True)
class Upload:
    archive: Path
    num_files: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_files} files, {self.num_bytes / MIB:.1f} MiB"


def make_upload(folder: Path, archive: Path, exclude: Sequence[str] = (), limit_bytes: int = LIMIT_BYTES) -> Upload:
    """Write `archive` (.zip). In a git checkout: what git tracks or would track. `exclude`: shell patterns of paths
    below `folder`, or of single names. Raises ConfigError when nothing is left, or more than `limit_bytes`.
    """
    files = [f for f in _files(folder) if not _excluded(f, (*LEFT_OUT, *exclude))]
    sizes = {f: (folder / f).stat().st_size for f in files}
    if not files:
        raise ConfigError(f"there is nothing to upload in {folder}: name a checkout with --working-dir")
    if sum(sizes.values()) > limit_bytes:
        raise ConfigError(_too_large(folder, sizes, limit_bytes))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as pack:
        for file in files:
            entry = zipfile.ZipInfo(file.as_posix(), LONG_AGO)
            entry.external_attr = ((folder / file).stat().st_mode & 0o777) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            pack.writestr(entry, (folder / file).read_bytes())
    return Upload(archive, len(files), archive.stat().st_size)


def _files(folder: Path) -> list[Path]:
    listed = _git_files(folder)
    found = listed if listed is not None else _walk(folder)
    return sorted(f for f in found if (folder / f).is_file())


def _git_files(folder: Path) -> list[Path] | None:
    """None where there is no git, or no checkout."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except FileNotFoundError:
        return None
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name] if done.returncode == 0 else None


def _walk(folder: Path) -> Iterator[Path]:
    for at, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _matches(name, LEFT_OUT)]
        yield from ((Path(at) / name).relative_to(folder) for name in files)


def _excluded(file: Path, patterns: Sequence[str]) -> bool:
    return _matches(file.as_posix(), patterns) or any(_matches(part, patterns) for part in file.parts)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _too_large(folder: Path, sizes: dict[Path, int], limit_bytes: int) -> str:
    by_place: Counter[str] = Counter()
    for file, size in sizes.items():
        by_place[file.parts[0]] += size
    largest = ", ".join(f"{place} {size / MIB:.0f} MiB" for place, size in by_place.most_common(3))
    return (
        f"{folder} has {sum(sizes.values()) / MIB:.0f} MiB to upload, at most {limit_bytes / MIB:.0f} are sent; the "
        f"largest: {largest}. Leave out what the job does not read with --exclude or .gitignore, and keep models and "
        "data on a disk that the cluster shares"
    )
