"""The attention that `auto` stands for, over every kind of engine."""

from __future__ import annotations

from itertools import product

import pytest

from services.config.schema import SGLangEngine
from services.rollout.sglang.attention import pick_attention
from services.speculation.strategy import OFF
from tests.services.rollout.engines import strategy

CHAIN, ARGMAX = strategy("eagle", 3), strategy("eagle", 7, sampled=False)
TREE, NGRAM = strategy("eagle", 3, 4, 9, sampled=False), strategy("ngram", 5, 3, 12)
HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


@pytest.mark.parametrize("strategies", [(OFF,), (CHAIN,), (OFF, CHAIN, ARGMAX)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chains_in_bfloat16_on_hopper_take_fa3(strategies: tuple[object, ...], head_dim: int) -> None:
    assert pick_attention(SGLangEngine(), HOPPER, "bfloat16", head_dim, strategies) == "fa3"  # type: ignore[arg-type]


def test_whatever_else_takes_triton() -> None:
    """One thing at a time that FlashAttention-3 has not been seen to do."""
    usual = {"capability": HOPPER, "dtype": "bfloat16", "head_dim": 128, "strategies": (OFF, CHAIN)}
    others = [
        {"capability": AMPERE}, {"capability": BLACKWELL}, {"capability": None}, {"dtype": "float32"},
        {"head_dim": 96}, {"head_dim": 256}, {"strategies": (OFF, TREE)}, {"strategies": (NGRAM,)},
    ]  # fmt: skip
    for other in others:
        assert pick_attention(SGLangEngine(), **(usual | other)) == "triton", other  # type: ignore[arg-type]
    assert pick_attention(SGLangEngine(deterministic=True), **usual) == "triton"  # type: ignore[arg-type]


def test_what_is_asked_for_stands() -> None:
    cells = product(("triton", "fa3", "flashinfer"), (HOPPER, AMPERE, None), ("bfloat16", "float32"), ((OFF,), (TREE,)))
    for wanted, capability, dtype, strategies in cells:
        engine = SGLangEngine(attention_backend=wanted)  # type: ignore[arg-type]
        assert pick_attention(engine, capability, dtype, 96, strategies) == wanted
