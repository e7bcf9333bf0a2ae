from __future__ import annotations

import io
import runpy
import subprocess
import tarfile
from pathlib import Path

import pytest

from deploy.provenance import ROOT, provenance

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=60, check=True).stdout


def test_a_checkout_tells_its_commit() -> None:
    assert provenance()["commit"] == git("rev-parse", "HEAD").decode().strip()


def test_an_archive_without_history_knows_its_commit(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD", "deploy/provenance.py"))) as archive:
        archive.extractall(tmp_path, filter="data")
    found = runpy.run_path(str(tmp_path / "deploy" / "provenance.py"))["provenance"]()
    assert (found["commit"], found["dirty"]) == (git("rev-parse", "HEAD").decode().strip(), None)
