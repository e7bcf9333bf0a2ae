"""Which settings a run keeps for good: resuming it with others would mix two experiments in one run folder.

What is not named here may change from one start to the next: where things run, how long to wait, when to evaluate, how
many steps in all, and speculation, which is lossless. Prompts (`data`) may change too: their fingerprint tells, and the
new set begins at its first prompt.
"""

from __future__ import annotations

from typing import Any

from services.config.schema import ClusterConfig

# Dotted paths; a section means all that is in it.
KEPT = (
    "model.path",
    "model.dtype",
    "rollout.group_size",
    "rollout.prompts_per_step",  # the position in the prompts follows from it
    "rollout.sampling",
    "speculation.acceptance",
    "speculation.accept_threshold",
    "reward.verifier",
    "reward.answer_marker",
    "reward.function",
    "policy",
    "drafter.method",
    "drafter.path",  # the rows of a head of its own mean what they meant at the start
    "drafter.aux_layers",
    "run.seed",
    "run.eval_prompts",  # held-out rewards before and after are compared
)
FREE_WITHIN = (
    "policy.threads",
    "policy.micro_batch_tokens",
    "policy.activation_checkpointing",
    "policy.reshard_after_forward",
    "policy.optimizer_offload",
)


def changed_settings(before: ClusterConfig, now: ClusterConfig) -> list[str]:
    """Lines such as "policy.learning_rate was 0.0001, now 0.001" for every kept setting that differs."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    return [line for path in KEPT for line in _differences(path, _at(old, path), _at(new, path))]


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


def _differences(path: str, old: Any, new: Any) -> list[str]:
    if path in FREE_WITHIN or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in _differences(f"{path}.{key}", old.get(key), new.get(key))]
    return [f"{path} was {old}, now {new}"]
