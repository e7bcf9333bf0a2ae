"""Small modules and functions; what is larger is listed with its reason. Projects of this field decay into one
coordinator file of thousands of lines; this test is what stops the first of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE_LINES = 400
FUNCTION_LINES = 60
LOOP_LINES = 120

MODULES_EXCEPTED: dict[str, str] = {}
FUNCTIONS_EXCEPTED: dict[str, str] = {}

FILES = sorted(f for folder in ("services", "actors", "deploy") for f in (ROOT / folder).rglob("*.py"))


def functions_of(file: Path) -> dict[str, int]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    name = file.relative_to(ROOT).as_posix()
    return {
        f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_module_and_functions_are_small(file: Path) -> None:
    name = file.relative_to(ROOT).as_posix()
    lines = len(file.read_text(encoding="utf-8").splitlines())
    if name not in MODULES_EXCEPTED:
        assert lines <= MODULE_LINES, f"{name} has {lines} lines: split it, or list it with a reason"
    large = {f: n for f, n in functions_of(file).items() if n > FUNCTION_LINES and f not in FUNCTIONS_EXCEPTED}
    assert not large, f"split, or list with a reason: {large}"


def test_the_loop_fits_on_two_screens() -> None:
    lines = len((ROOT / "services/coordinator/loop.py").read_text(encoding="utf-8").splitlines())
    assert lines <= LOOP_LINES, f"loop.py is the algorithm: {lines} lines, at most {LOOP_LINES}"


def test_exceptions_are_still_needed() -> None:
    for name in MODULES_EXCEPTED:
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) > MODULE_LINES, f"{name} is small again"
    sizes = {f: n for file in FILES for f, n in functions_of(file).items()}
    for name in FUNCTIONS_EXCEPTED:
        assert sizes.get(name, 0) > FUNCTION_LINES, f"{name} is small again"


def test_no_packages_under_tests() -> None:
    """An __init__.py under tests/services would hide the real package of that name."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
