"""Train / held-out split by a hash of the prompt's text: the same prompt always falls on the same side, whatever the
order, the size of the set, the task name or the seed, so that warm-up, training and evaluation agree without talking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from services.core.errors import DataError
from services.core.types import Prompt


@dataclass(frozen=True, slots=True)
class Split:
    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]


def is_heldout(text: str, heldout_fraction: float) -> bool:
    """True for about `heldout_fraction` of all texts; a larger fraction keeps all that a smaller one had."""
    digest = hashlib.sha256(f"heldout:{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < heldout_fraction * 2**64


def split_prompts(prompts: Iterable[Prompt], heldout_fraction: float) -> Split:
    """Both sides in the given order; raises DataError when one side is empty."""
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    for prompt in prompts:
        (heldout if is_heldout(prompt.text, heldout_fraction) else train).append(prompt)
    if not train or not heldout:
        side, total = ("training" if not train else "held-out"), len(train) + len(heldout)
        raise DataError(
            f"no {side} prompt is left of {total} with data.heldout_fraction {heldout_fraction}: "
            "use more prompts or another fraction"
        )
    return Split(tuple(train), tuple(heldout))
