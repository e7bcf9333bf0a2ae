"""Which of SGLang's attention kernels an engine runs.

What decides is verification: it asks for several positions of each request, and SGLang's Triton kernel for that goes
through a request's whole context in one block of the GPU (its kernel for one position shares the context out among
many). So a round takes the longer the longer the context, however few requests run: just where a tail of long
responses ends. FlashAttention-3 shares it out (figures: docs/strategies.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from services.config.schema import SGLangEngine
from services.speculation.strategy import DraftStrategy

Attention = Literal["triton", "fa3", "flashinfer"]

HOPPER = 9  # first number of its compute capability
HEAD_DIMS = (64, 128)


def pick_attention(
    engine: SGLangEngine,
    capability: tuple[int, int] | None,
    dtype: str,
    head_dim: int,
    strategies: Iterable[DraftStrategy],
) -> Attention:
    """What `auto` stands for: FlashAttention-3 where it has been seen to serve, Triton elsewhere. `capability`: the
    GPU's, None without one. Trees bring a mask, and deterministic inference forbids sharing the context out."""
    if engine.attention_backend != "auto":
        return engine.attention_backend
    hopper = capability is not None and capability[0] == HOPPER
    chains = all(s.is_off or (s.drafter == "eagle" and s.topk == 1) for s in strategies)
    fits = chains and not engine.deterministic and dtype == "bfloat16" and head_dim in HEAD_DIMS
    return "fa3" if hopper and fits else "triton"
