"""What benchmarks of a rollout server in their own process share: one that is ready to generate."""

from __future__ import annotations

import time

from services.config.schema import ClusterConfig
from services.core.protocols import Clock
from services.drafter.state import read_drafter
from services.models.files import model_dir, read_config, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_folder, drafter_method
from services.rollout.service import RolloutService, build_rollout_service

EPOCH = 1


def loaded_server(config: ClusterConfig, clock: Clock = time.monotonic) -> RolloutService:
    """Opened for EPOCH, with the config's model, and its drafter if a strategy drafts with one."""
    folder = model_dir(config.model.path)
    service = build_rollout_service(config, 0, clock)
    service.open_epoch(EPOCH)
    service.load_policy(0, read_tensors(folder), EPOCH)
    if config.speculation.learned:
        method = drafter_method(config.drafter, model_spec(read_config(folder)))
        service.load_drafter(0, read_drafter(drafter_folder(config), method), EPOCH)
    return service
