"""What is sent, how large it is, and what is refused (pitfall 67)."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from deploy.upload import make_upload
from services.core.errors import ConfigError


def write(folder: Path, **files: int) -> None:
    for name, size in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def names(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as pack:
        return pack.namelist()


@pytest.mark.parametrize("checkout", [True, False])
def test_repository_environments_runs_and_caches_stay_here(tmp_path: Path, checkout: bool) -> None:
    folder = tmp_path / "code"
    write(folder, deploy__main=3, _DOT_venv__lib=50, runs__r1__metrics=50, checkpoints__c=50, services__a=1)
    (folder / "services" / "__pycache__").mkdir()
    (folder / "services" / "__pycache__" / "a.pyc").write_bytes(b"x")
    if checkout:
        subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=30)
        write(folder, _DOT_git__objects__big=1000)
        (folder / ".gitignore").write_text("private\n")
        write(folder, private=1)
    upload = make_upload(folder, tmp_path / "a.zip", limit_bytes=500)
    assert names(upload.archive) == ([".gitignore"] if checkout else []) + ["deploy/main", "services/a"]
    assert upload.num_files == 2 + checkout and upload.num_bytes == upload.archive.stat().st_size
    assert str(upload) == f"{upload.num_files} files, 0.0 MiB"


def test_what_is_too_large_is_named_with_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "code", models__target=9 * 2**20, data=2 * 2**20, main=10)
    with pytest.raises(ConfigError, match=r"has 11 MiB to upload, at most 1 .*; the largest: models 9 MiB, data 2"):
        make_upload(tmp_path / "code", tmp_path / "a.zip", limit_bytes=2**20)
    left = make_upload(tmp_path / "code", tmp_path / "a.zip", ["models", "da*"], 2**20)
    assert names(left.archive) == ["main"]


def test_equal_files_make_equal_archives_whenever_they_were_written(tmp_path: Path) -> None:
    for at in ("a", "b"):
        write(tmp_path / at, main=10, sub__more=5)
    (tmp_path / "b" / "main").touch()
    first = make_upload(tmp_path / "a", tmp_path / "a.zip").archive.read_bytes()
    assert first == make_upload(tmp_path / "b", tmp_path / "b.zip").archive.read_bytes()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    with pytest.raises(ConfigError, match="nothing to upload"):
        make_upload(tmp_path / "code", tmp_path / "a.zip")
