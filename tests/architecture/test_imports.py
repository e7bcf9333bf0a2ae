"""The import rules of the design, as contracts in pyproject.toml and as what really happens at run time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIGHT = (
    "services.core",
    "services.config",
    "services.coordinator",
    "services.report",
    "services.energy",
    "services.simulator",
)


def modules_under(package: str) -> list[str]:
    folder = ROOT / package.replace(".", "/")
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted(folder.rglob("*.py"))
    ]


def test_the_contracts_hold() -> None:
    from importlinter.cli import lint_imports

    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def loaded(modules: list[str], watched: tuple[str, ...], timeout_s: float) -> list[str]:
    """Which of `watched` a fresh interpreter has after importing `modules`."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print('loaded:', *[m for m in {watched!r} if m in sys.modules])\n"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("package", LIGHT)
def test_light_slices_load_without_torch_or_ray(package: str) -> None:
    assert loaded(modules_under(package), ("torch", "ray", "transformers", "fastapi"), 60) == []


def test_services_load_without_ray() -> None:
    assert loaded(modules_under("services"), ("ray",), 150) == []


def test_help_answers_without_torch_or_ray() -> None:
    assert loaded(["deploy.__main__"], ("torch", "ray", "transformers"), 60) == []
