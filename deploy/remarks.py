"""What a configuration allows, though whoever wrote it may not have meant it: said before a run begins."""

from __future__ import annotations

from collections.abc import Iterator

from services.config.schema import ClusterConfig


def remarks(config: ClusterConfig) -> Iterator[str]:
    if _drafter_never_idle(config):
        colocated = config.placement.colocated
        remedy = "take more servers" if colocated else "set drafter.training.beside_policy: true to train it meanwhile"
        yield (
            "the drafter is never trained: the only rollout server generates to the end of each phase, and then the "
            f"policy is trained; {remedy}, or set drafter.training.when: never if that is meant"
        )


def _drafter_never_idle(config: ClusterConfig) -> bool:
    return config.trains_drafter and config.rollout.num_servers == 1 and not config.drafts_beside_policy
