"""From the configuration to the drafter method and its folder."""

from __future__ import annotations

from pathlib import Path

from services.config.drafter import DrafterConfig
from services.config.schema import ClusterConfig
from services.models.drafter import DrafterMethod
from services.models.eagle import Eagle
from services.models.eagle3 import Eagle3, pick_aux_layers
from services.models.files import drafter_dir
from services.models.layers import ModelSpec
from services.models.vocabulary import read_draft_ids


def drafter_method(config: DrafterConfig, target: ModelSpec) -> DrafterMethod:
    """The run's drafter method for this target. Raises ConfigError when the target is too shallow for it, DataError
    when drafter.path holds a mapping of draft tokens that does not fit."""
    if config.method == "eagle3":
        ids = None if config.path is None else read_draft_ids(config.path, target.vocab_size)
        return Eagle3(target, pick_aux_layers(config.aux_layers, target.num_layers), ids)
    return Eagle(target)


def drafter_folder(config: ClusterConfig) -> Path:
    """Where the drafter that a run begins with lies: drafter.path, else the folder that belongs to the model."""
    return config.drafter.path or drafter_dir(config.model.path, config.drafter.method)
