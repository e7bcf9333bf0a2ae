"""Rendered trees and manifests for the tests of this folder."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.cli_shared import PRESETS_DIR
from deploy.k8s.options import RenderOptions
from deploy.k8s.render import built_overlay
from deploy.k8s.tree import render_tree
from services.config.load import load_config

PRESETS = sorted(p.stem for p in PRESETS_DIR.glob("*.yaml"))
ROOT = Path(__file__).resolve().parents[3]


@cache
def tree_of(preset: str, *overrides: str) -> dict[str, str]:
    config = load_config(preset, overrides=overrides, presets_dir=PRESETS_DIR)
    return render_tree(config, RenderOptions(config.run.name))


@cache
def _built(preset: str, overlay: str, overrides: tuple[str, ...]) -> str:
    return built_overlay(tree_of(preset, *overrides), overlay)


def overlay_text(preset: str, overlay: str, *overrides: str) -> str:
    return _built(preset, overlay, overrides)


def manifests_of(preset: str, overlay: str, *overrides: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(overlay_text(preset, overlay, *overrides)))


def one(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [m for m in manifests if m["kind"] == kind]
    return deepcopy(found)


def as_stream(*manifests: dict[str, Any]) -> str:
    return yaml.safe_dump_all(manifests)
