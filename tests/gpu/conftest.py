"""GPU tests: `LONGTAIL_GPU_MODEL=DIR pytest -m gpu tests/gpu`, DIR made by `longtail warmup reasoner-warmup --out DIR`.

Each skips with its reason where there is no GPU, no SGLang or no model. CI never sees a GPU. A module that says
`NEEDS_MODEL = False` takes a GPU only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from services.models.files import read_config
from tests.gpu.cases import CASES, Case
from tests.gpu.reference import Reference

RESULTS = Path(__file__).parent / "results"
WORKER_LIMIT_S = float(os.environ.get("LONGTAIL_GPU_LIMIT_S", "420"))


def _missing(needs_model: bool) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device on this machine"
    if not needs_model:
        return None
    if find_spec("sglang") is None:
        return "SGLang is not installed: pip install '.[sglang]'"
    if not os.environ.get("LONGTAIL_GPU_MODEL"):
        return "LONGTAIL_GPU_MODEL names no model folder: make one with `longtail warmup reasoner-warmup --out DIR`"
    return None


def _case_name(item: pytest.Item) -> str:
    """Of the engine that a test asks about; empty for one that asks about none."""
    call = getattr(item, "callspec", None)
    return call.params.get("case", "") if call is not None else ""


def _missing_gpus(case: Case) -> str | None:
    there = torch.cuda.device_count()
    return f"{case.name} takes {case.tp} GPUs, this machine has {there}" if there < case.tp else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {needs_model: _missing(needs_model) for needs_model in (True, False)}
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            reason = reasons[getattr(getattr(item, "module", None), "NEEDS_MODEL", True)]
            if reason is None and (case := CASES.get(_case_name(item))):
                reason = _missing_gpus(case)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def model() -> Path:
    return Path(os.environ["LONGTAIL_GPU_MODEL"])


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="session")
def probes(model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What every engine's worker found; all start side by side on the one GPU."""
    folder = Path(os.environ.get("LONGTAIL_GPU_PROBES") or tmp_path_factory.mktemp("probes"))
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(reference.prompts()))
    possible = [name for name, case in CASES.items() if _missing_gpus(case) is None]
    wanted = os.environ.get("LONGTAIL_GPU_CASES", ",".join(possible)).split(",")
    running = {}
    for name in wanted:
        log = (folder / f"{name}.log").open("w")
        command = [
            sys.executable,
            "-m",
            "tests.gpu.worker",
            name,
            str(model),
            str(prompts),
            str(folder / f"{name}.json"),
        ]
        running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + WORKER_LIMIT_S
    for process in running.values():
        try:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    found = {}
    for name in wanted:
        file = folder / f"{name}.json"
        found[name] = json.loads(file.read_text()) if file.is_file() else {"log": _tail(folder / f"{name}.log")}
    return found


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


@pytest.fixture(scope="session")
def results(model: Path, save: Callable[[str, dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    """Figures of the session, written with where they come from."""
    figures: dict[str, Any] = {}
    yield figures
    config = read_config(model / "target")
    shape = {k: config[k] for k in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    save("sglang_engine", {"model": shape, "figures": figures})


@pytest.fixture(scope="session")
def save() -> Callable[[str, dict[str, Any]], None]:
    """Writes a record, with where it comes from, to the results folder or to $OUT."""
    from deploy.provenance import provenance

    def write(name: str, record: dict[str, Any]) -> None:
        out = Path(os.environ.get("OUT") or RESULTS) / f"{name}.json"
        out.write_text(json.dumps({"provenance": provenance(), **record}, indent=1) + "\n")

    return write
