"""`longtail warmup`: make a model and its drafters, from nothing or from a model that is there."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from deploy.warmup import run_warmup
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.models.files import POCKET_DIR

POCKET_RUN = "pocket-warmup"


def make_model(config: ClusterConfig, out: Path | None, overwrite: bool, keep_target: bool) -> None:
    """Print progress, then the measured figures as JSON. Raises ConfigError rather than replace a model unasked."""
    if out is None and config.run.name != POCKET_RUN:
        raise ConfigError(f"only {POCKET_RUN} has a folder of its own: name one for {config.run.name} with --out")
    folder = POCKET_DIR if out is None else out
    there = (folder / "target" / "config.json").exists()
    if keep_target and not (there and (folder / "warmup.json").exists()):
        raise ConfigError(f"{folder} holds no target of an earlier warm-up: leave --keep-target out")
    if there and not overwrite and not keep_target:
        raise ConfigError(
            f"{folder} holds a model: name another folder with --out, replace it with --overwrite, or make new "
            "drafters for it with --keep-target"
        )
    # flushed: the log of an unattended run shows how far it is
    print(json.dumps(asdict(run_warmup(config, folder, partial(print, flush=True), keep_target))))
