"""What all tests share: one thread per library, no network, reasons for what is skipped, and who takes which tests when
several processes do."""

from __future__ import annotations

import os
from typing import Any

# Before torch is imported anywhere: the machine's two cores are shared by Ray actors and the test itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

# No deadline: a loaded machine is slow, not wrong.
settings.register_profile("longtail", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("longtail")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("-m") or ""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: run `pytest -m gpu` on a machine that has one"))
    if "bench" not in chosen:
        for item in items:
            if item.get_closest_marker("bench"):
                item.add_marker(pytest.mark.skip(reason="measures rather than checks: run `pytest -m bench`"))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, with `-n`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.sharing import FilesAndRay

    return FilesAndRay(config, log)
