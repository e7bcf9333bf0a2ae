"""Every YAML that ships is one that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.load import dump_config, load_config

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((ROOT / "deploy/presets").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_preset_loads_and_survives_a_round_trip(preset: Path, tmp_path: Path) -> None:
    config = load_config(preset)
    assert config.run.name == preset.stem
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(config), encoding="utf-8")
    assert load_config(written) == config


def test_the_named_presets_ship() -> None:
    assert {"pocket-demo", "pocket-learn", "pocket-tiny"} <= {p.stem for p in PRESETS}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_preset_says_why(preset: Path) -> None:
    assert preset.read_text(encoding="utf-8").startswith("# ")
