from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.report.run_folder import RunFolder
from tests.services.gateway.runs import make_run


@pytest.fixture(scope="session")
def finished_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs; nobody writes into them."""
    root = tmp_path_factory.mktemp("gateway") / "runs"
    make_run(root, "first")
    make_run(root, "second", minutes=5, steps=12)
    return root


@pytest.fixture
def living(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that goes on."""
    folder = make_run(tmp_path / "runs", "living", finished=False)
    yield folder
    folder._progress_file.close()
