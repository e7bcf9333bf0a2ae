"""Writes the tree, or prints what one overlay of it comes to."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from deploy.k8s.kustomize import build
from services.core.errors import ConfigError

MARK = "longtail-k8s.txt"  # lists what a rendering wrote, so that the next one removes what it no longer writes


def write_tree(tree: Mapping[str, str], folder: Path) -> None:
    """Raises ConfigError when `folder` holds files that no rendering wrote."""
    old = _written_before(folder)
    for path in sorted(set(old) - set(tree)):
        (folder / path).unlink(missing_ok=True)
    for path, text in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    (folder / MARK).write_text("".join(f"{path}\n" for path in sorted(tree)), encoding="utf-8")


def _written_before(folder: Path) -> list[str]:
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder with --out")
    if (folder / MARK).exists():
        return (folder / MARK).read_text(encoding="utf-8").splitlines()
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} holds files that longtail k8s render did not write: give a new folder with --out")
    return []


def built_overlay(tree: Mapping[str, str], overlay: str) -> str:
    """One YAML stream, as kubectl apply -k would send it."""
    with tempfile.TemporaryDirectory(prefix="longtail-k8s-") as name:
        write_tree(tree, Path(name))
        return build(Path(name) / "overlays" / overlay)
