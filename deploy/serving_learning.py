"""Learning while serving, wired: the configuration that it needs, and the learner of one model server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from deploy.inputs import needs_drafter
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.drafter.learner import OnlineLearner
from services.drafter.shelf import Shelf, policy_mark
from services.drafter.trainer import DrafterTrainer
from services.models.device import pick_device
from services.models.files import model_dir, read_config
from services.models.layers import model_spec

KEEP_STATES = "drafter.states=engine"


def check_learning(config: ClusterConfig) -> None:
    """Raises ConfigError when there is no drafter that could learn from what is served."""
    if not needs_drafter(config):
        raise ConfigError("--learn trains the drafter and no strategy has one: add a strategy with drafter 'eagle'")
    if config.drafter.method != "eagle":
        raise ConfigError(
            f"--learn trains from the target's last hidden states, and {config.drafter.method} drafters read others: "
            "serve it without --learn"
        )


def build_learner(config: ClusterConfig, folder: Path) -> OnlineLearner:
    """Of the server that serves this configuration; better drafters go to `folder`."""
    target_config = read_config(model_dir(config.model.path))
    trainer = DrafterTrainer(
        model_spec(target_config),
        config.drafter,
        config.rollout.sampling.temperature,
        pick_device(config.model.device),
    )

    def make_shelf(policy_version: int, policy: Mapping[str, Tensor]) -> Shelf:
        return Shelf(folder, trainer.method, target_config, f"policy-{policy_version}-{policy_mark(policy)}")

    files = ThreadPoolExecutor(1, thread_name_prefix="drafters")
    return OnlineLearner(trainer, make_shelf, config.run.seed, time.monotonic, files)


def told_at_start(config: ClusterConfig, folder: Path) -> str:
    """What is kept of the answers, in a sentence for whoever starts the server."""
    mebibytes = config.drafter.buffer_bytes / 2**20
    return (
        f"learning from answers: their token ids and hidden states are kept in memory, at most "
        f"{mebibytes:g} MiB per server (drafter.buffer_bytes), never written; better drafters go to {folder}"
    )
