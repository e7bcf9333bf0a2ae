"""From prompts to work: which prompts a step takes, and which seed each rollout gets. Pure and reproducible."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from services.core.types import GroupWork, Prompt, SamplingParams


def rollout_seed(run_seed: int, label: str, position: int, index: int) -> int:
    """A 48-bit seed that depends on nothing but its arguments, so a re-dispatched rollout is drawn again alike."""
    key = f"{run_seed}/{label}/{position}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")


def make_work(
    prompts: Sequence[Prompt],
    label: str,
    group_size: int,
    sampling: SamplingParams,
    run_seed: int,
    keep_states: bool = False,
) -> list[GroupWork]:
    """One GroupWork per prompt; group ids are `<label>/<position>`."""
    indices = tuple(range(group_size))
    return [
        GroupWork(
            group_id=f"{label}/{position:04d}",
            prompt=prompt,
            indices=indices,
            seeds=tuple(rollout_seed(run_seed, label, position, i) for i in indices),
            sampling=sampling,
            keep_states=keep_states,
        )
        for position, prompt in enumerate(prompts)
    ]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of the prompts in their order: a position in them means nothing in another set."""
    return hashlib.sha256("\n".join(prompt.id for prompt in prompts).encode()).hexdigest()[:16]


def prompts_of_step(prompts: Sequence[Prompt], step: int, per_step: int, seed: int) -> list[Prompt]:
    """The prompts of 1-based `step`: passes over all prompts, each pass in its own shuffled order."""
    assert prompts and step >= 1
    chosen: list[Prompt] = []
    order: list[int] = []
    shuffled_pass = -1
    for place in range((step - 1) * per_step, step * per_step):
        this_pass, offset = divmod(place, len(prompts))
        if this_pass != shuffled_pass:
            order = list(range(len(prompts)))
            random.Random(f"{seed}/{this_pass}").shuffle(order)
            shuffled_pass = this_pass
        chosen.append(prompts[order[offset]])
    return chosen
