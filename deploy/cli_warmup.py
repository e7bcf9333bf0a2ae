"""`longtail warmup`: make a pocket model where none is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from deploy.warmup import run_warmup
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.models.files import POCKET_DIR


def make_model(config: ClusterConfig, out: Path | None, overwrite: bool) -> None:
    """Print the measured figures as JSON. Raises ConfigError rather than replace a model unasked."""
    folder = POCKET_DIR if out is None else out
    if (folder / "target" / "config.json").exists() and not overwrite:
        raise ConfigError(f"{folder} holds a model: name another folder with --out, or replace it with --overwrite")
    print(json.dumps(asdict(run_warmup(config, folder))))
