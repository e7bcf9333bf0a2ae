"""From prompts to work: which prompts a step takes, and which seed each rollout gets. Pure and reproducible."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice

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
    first: int = 0,
) -> list[GroupWork]:
    """One GroupWork per prompt; group ids are `<label>/<position>`, positions count from `first`."""
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
        for position, prompt in enumerate(prompts, first)
    ]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of the prompts in their order: a position in them means nothing in another set."""
    return hashlib.sha256("\n".join(prompt.id for prompt in prompts).encode()).hexdigest()[:16]


def in_passes(prompts: Sequence[Prompt], start: int, key: str) -> Iterator[Prompt]:
    """Passes over all prompts without end, from place `start` on; each pass in an own order, which `key` decides."""
    assert prompts and start >= 0
    this_pass, offset = divmod(start, len(prompts))
    while True:
        order = list(range(len(prompts)))
        random.Random(f"{key}/{this_pass}").shuffle(order)
        yield from (prompts[i] for i in order[offset:])
        this_pass, offset = this_pass + 1, 0


def prompts_of_step(prompts: Sequence[Prompt], step: int, per_step: int, seed: int) -> list[Prompt]:
    """The prompts of 1-based `step`: passes over all prompts, each pass in its own shuffled order."""
    return list(islice(in_passes(prompts, (step - 1) * per_step, str(seed)), per_step))
