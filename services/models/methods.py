"""From `drafter.method` to the method."""

from __future__ import annotations

from services.config.drafter import DrafterConfig
from services.models.drafter import DrafterMethod
from services.models.eagle import Eagle
from services.models.eagle3 import Eagle3, pick_aux_layers
from services.models.layers import ModelSpec


def drafter_method(config: DrafterConfig, target: ModelSpec) -> DrafterMethod:
    """The run's drafter method for this target. Raises ConfigError when the target is too shallow for it."""
    if config.method == "eagle3":
        return Eagle3(target, pick_aux_layers(config.aux_layers, target.num_layers))
    return Eagle(target)
