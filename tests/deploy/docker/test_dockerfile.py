"""The Dockerfile cannot be built without Docker; what can be wrong with it is checked as far as that goes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from deploy.k8s.pods import DATA, USER
from deploy.k8s.ray_objects import RAY_VERSION

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), lines joined, comments dropped."""
    lines = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [(w[0], w[2]) for line in joined.splitlines() if line.strip() for w in [line.partition(" ")]]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, arguments in instructions():
        if name == "FROM":
            found[arguments.split(" AS ")[1]] = current = []
        else:
            current.append((name, arguments))
    return found


def copied() -> list[tuple[list[str], str]]:
    """(sources, target) of every COPY from the repository."""
    arguments = [a.split() for name, a in instructions() if name == "COPY" and not a.startswith("--from")]
    return [(words[:-1], words[-1]) for words in arguments]


def test_every_copied_path_exists_and_reaches_the_build() -> None:
    sources = {source for paths, _ in copied() for source in paths}
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == sources


def test_stages_build_on_pinned_images_or_each_other() -> None:
    bases = [a.split(" AS ") for name, a in instructions() if name == "FROM"]
    seen: list[str] = []
    for image, name in bases:
        assert image in seen or re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", image), image
        seen.append(name)
    froms = [a.split()[0].removeprefix("--from=") for n, a in instructions() if n == "COPY" and a.startswith("--from")]
    assert froms and set(froms) <= set(seen)


def test_python_is_one_that_the_package_supports() -> None:
    low, high = re.findall(r"[\d.]+", pyproject()["project"]["requires-python"])
    (version,) = set(re.findall(r"FROM python:(3\.\d+)", DOCKERFILE))
    assert as_tuple(low) <= as_tuple(version) < as_tuple(high)


def as_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def pyproject() -> dict[str, dict[str, str]]:
    loaded: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return loaded


def test_versions_are_held_and_ray_is_that_of_the_manifests() -> None:
    installs = [a for name, a in instructions() if name == "RUN" and "pip install" in a]
    assert len(installs) == 2 and all(re.search(r"-c (constraints|ray)\.txt", a) for a in installs)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [p for p in pins if p.startswith("ray==")] == [f"ray=={RAY_VERSION}"]
    (wanted,) = [d for d in pyproject()["project"]["dependencies"] if d.startswith("ray[")]
    assert RAY_VERSION.startswith(wanted.partition("==")[2].rstrip("*"))


@pytest.mark.parametrize("stage", ["longtail", "sglang"])
def test_images_run_as_the_user_of_the_pods(stage: str) -> None:
    assert ("USER", f"{USER}:{USER}") in stages()[stage]
    names = [name for name, _ in stages()[stage]]
    assert names.index("USER") > max(i for i, n in enumerate(names) if n in ("RUN", "COPY")), "nothing as root after it"
    base = dict(stages()["base"])
    assert f"--uid {USER}" in base["RUN"] and base["WORKDIR"] == DATA


def test_packages_of_the_system_leave_no_lists_behind() -> None:
    for _, arguments in [i for i in instructions() if "apt-get install" in i[1]]:
        assert "--no-install-recommends" in arguments and "rm -rf /var/lib/apt/lists/*" in arguments


def test_compilers_stay_out_of_the_image_that_does_not_need_them() -> None:
    for stage in ("base", "longtail"):
        assert not any("gcc" in arguments for _, arguments in stages()[stage])


@pytest.mark.slow
def test_what_is_copied_is_enough_for_the_package(tmp_path: Path) -> None:
    """The package is built from a folder that holds only what the Dockerfile copies."""
    for sources, target in copied():
        for source in sources:
            place = tmp_path / (source if target == "./" else target)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {"deploy/presets/pocket-demo.yaml", "deploy/pocket/target/model.safetensors", "deploy/k8s/tree.py"}
    assert needed | {"deploy/k8s/schemas/custom-resources.json.xz"} <= names
