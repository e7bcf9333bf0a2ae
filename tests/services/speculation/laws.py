"""Small languages, their processed laws, and how far verification's own law is from them."""

from __future__ import annotations

import random
from functools import cache

import torch
from torch import Tensor

from services.core.types import SamplingParams
from services.models.sampling import SamplingTensors, process_logits, sampling_tensors
from services.speculation.tree import TreeShape
from services.speculation.verify import verify_chain, verify_tree
from tests.services.models.test_sampling import reference
from tests.services.models.tiny import CPU
from tests.services.speculation.enumeration import (
    Conditional,
    Outcomes,
    Verify,
    committed,
    worst_gap,
)

PLAIN = SamplingParams()
PROCESSED = {
    "plain": PLAIN,
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=1.6),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "min_p": SamplingParams(min_p=0.25),
    "all": SamplingParams(temperature=1.3, top_k=3, top_p=0.95, min_p=0.05),
    "greedy": SamplingParams(temperature=0.0),
}


def row(p: SamplingParams) -> SamplingTensors:
    return sampling_tensors([p], CPU)


def random_logits(seed: int, vocab: int, spread: float = 1.5) -> Conditional:
    """A language model in a hash: each prefix has logits of its own."""

    @cache
    def logits(prefix: tuple[int, ...]) -> Tensor:
        rng = random.Random(f"{seed}/{prefix}")
        return torch.tensor([rng.gauss(0, spread) for _ in range(vocab)], dtype=torch.float64)

    return logits


def masked_logits(base: Conditional, keep: Conditional) -> Conditional:
    """`base` with the tokens of probability zero where `keep` says 0."""
    return lambda prefix: base(prefix).masked_fill(keep(prefix) == 0, -torch.inf)


def processed(logits: Conditional, p: SamplingParams) -> Conditional:
    """By the function the engine uses."""
    return cache(lambda prefix: process_logits(logits(prefix)[None], row(p)).softmax(-1)[0])


def by_hand(logits: Conditional, p: SamplingParams) -> Conditional:
    """The same distribution from plain Python: what the law is compared with."""
    return cache(lambda prefix: torch.tensor(reference(logits(prefix).tolist(), p), dtype=torch.float64))


def tree(shape: TreeShape) -> Verify:
    return lambda t, tokens, q, lengths, u: verify_tree(t, tokens, q, lengths, shape, u)


def gap(
    outcomes: Outcomes, given_target: Conditional, true_target: Conditional, verify: Verify = verify_chain
) -> float:
    """Worst difference over the joint laws of the first 1, 2 and 3 tokens, and over single drafts if one-hot."""
    laws = committed(outcomes, given_target, verify)
    assert all(abs(sum(law.values()) - 1) < 1e-6 for law in laws)
    return max(worst_gap(law, true_target, count) for law in laws for count in (1, 2, 3))
