"""One word, one meaning: the names that the glossary forbids, broad excepts, and paths of someone's machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(f for folder in ("services", "actors", "deploy") for f in (ROOT / folder).rglob("*.py"))

# Whole names, or whole words of a snake_case name.
FORBIDDEN_NAMES = {
    "spec_model": "drafter",
    "ea_layer": "drafter",
    "draft_model": "drafter",
    "teacher": "target",
    "trajectory": "rollout",
    "trajectories": "rollouts",
    "episode": "rollout",
    "old_logprobs": "rollout_logprobs",
    "logps": "policy_logprobs, rollout_logprobs or ref_logprobs",
    "gamma": "depth or num_draft_tokens",
    "speculate_k": "num_draft_tokens",
    "accept_length": "num_accepted_tokens or acceptance_length",
    "accept_rate": "acceptance_rate",
    "mab": "selector",
    "refit": "load or publish",
    "completion_ids": "response_ids",
    "bubble": "idle window",
}
# (file, name): where another meaning of the word is the field's own.
NAMES_EXCEPTED: dict[tuple[str, str], str] = {
    ("services/models/sampling.py", "_GAMMA"): "SplitMix64's own name for its increment",
}
# Process edges, where whatever went wrong is raised again or marks the service unhealthy.
BROAD_EXCEPT_ALLOWED: dict[str, str] = {
    "services/reward/worker.py": "third-party graders raise anything; it becomes Reward.error, never a wrong answer",
}


def names_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def forbidden_in(name: str) -> str | None:
    padded = f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower()}_"
    return next((word for word in FORBIDDEN_NAMES if f"_{word}_" in padded), None)


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_names_follow_the_glossary(file: Path) -> None:
    path = file.relative_to(ROOT).as_posix()
    found = [
        f"line {line}: {name} (say {FORBIDDEN_NAMES[word]})"
        for name, line in names_of(ast.parse(file.read_text(encoding="utf-8")))
        if (word := forbidden_in(name)) and (path, name) not in NAMES_EXCEPTED
    ]
    assert not found, "\n".join(found)


def test_the_glossary_check_sees_words_inside_names() -> None:
    assert forbidden_in("mean_accept_length") == "accept_length"
    assert forbidden_in("SpecModel") == "spec_model"
    assert forbidden_in("num_accepted_tokens") is None
    assert forbidden_in("acceptance_length") is None


def is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(k is None or (isinstance(k, ast.Name) and k.id in ("Exception", "BaseException")) for k in kinds)


def reraises(handler: ast.ExceptHandler) -> bool:
    """Clean up and pass on: the handler's last statement is a bare `raise`."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_no_broad_except(file: Path) -> None:
    name = file.relative_to(ROOT).as_posix()
    broad = [
        node.lineno
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not reraises(node)
    ]
    if name in BROAD_EXCEPT_ALLOWED:
        assert broad, f"{name} needs no exception any more"
    else:
        assert not broad, f"{name} swallows every error in lines {broad}: name the errors, or list it with a reason"


def shipped_files() -> list[Path]:
    """Files git tracks or would track; the whole tree where there is no git."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode == 0:
        return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]
    return [f for f in ROOT.rglob("*") if f.is_file() and not {".venv", ".git", "runs"} & set(f.parts)]


# Spelt in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(
    "/(?:" + "work|root|opt/" + "wheels|opt/" + "pypi)" + r"(?=[/\s\"'`),]|$)|/home/[a-z]+/|/Users/[A-Za-z]+/"
)


def test_no_path_of_one_machine() -> None:
    found = []
    for file in shipped_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and pictures
        found += [f"{file.relative_to(ROOT)}: {m.group()}" for m in MACHINE_PATH.finditer(text)]
    assert not found, "\n".join(found)
