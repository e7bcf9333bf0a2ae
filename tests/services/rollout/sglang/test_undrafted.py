"""The draw that stands in for the kernel which SGLang cannot compile without drafts."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.rollout.sglang.undrafted import draw, verify_chain


def call(batch: int, nodes: int, uniforms: Tensor | None = None, probs: Tensor | None = None) -> dict[str, Any]:
    """What SGLang calls it with for `nodes` per request over 5 tokens."""
    rows = torch.arange(batch * nodes).reshape(batch, nodes)
    return {
        "predicts": torch.full((batch * nodes,), -7, dtype=torch.int32),
        "accept_index": torch.full((batch, nodes), -1, dtype=torch.int32),
        "accept_token_num": torch.full((batch,), 9, dtype=torch.int32),
        "candidates": torch.zeros(batch, nodes, dtype=torch.long),
        "retrive_index": rows,
        "target_probs": torch.full((batch, nodes, 5), 0.2) if probs is None else probs,
        "uniform_samples_for_final_sampling": torch.rand(batch) if uniforms is None else uniforms,
        "draft_probs": torch.rand(batch, 1, 5),
    }


def refuse(**tensors: Any) -> None:
    raise AssertionError("the kernel cannot be compiled for one node")


def test_with_drafts_it_is_sglangs_own() -> None:
    seen: list[dict[str, Any]] = []
    asked = call(3, 2)
    verify_chain(lambda **tensors: seen.append(tensors), **asked)
    assert seen == [asked] and (asked["predicts"] == -7).all()


def test_without_drafts_roots_are_accepted_and_one_token_follows_each() -> None:
    probs = torch.eye(5)[[3, 0, 4]].unsqueeze(1)
    asked = call(3, 1, probs=probs)
    verify_chain(refuse, **asked)
    assert asked["predicts"].tolist() == [3, 0, 4]
    assert asked["accept_index"].tolist() == [[0], [1], [2]] and asked["accept_token_num"].tolist() == [0, 0, 0]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any))
def test_tokens_are_drawn_as_often_as_the_target_says(weights: list[int]) -> None:
    """Over a grid of uniforms, exactly."""
    total = sum(weights)
    uniforms = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    probs = torch.tensor(weights, dtype=torch.float64).expand(total, -1) / total
    assert torch.bincount(draw(probs, uniforms), minlength=len(weights)).tolist() == weights


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.3, 1.5]), min_size=2, max_size=9).filter(any))
def test_what_has_no_probability_is_never_drawn(probs: list[float]) -> None:
    """At both ends of the coin, where rounding would."""
    rows = torch.tensor(probs).expand(3, -1)
    edge = torch.tensor([0.0, 1 - 2**-24, 1 - 2**-12])
    assert all(probs[i] > 0 for i in draw(rows, edge).tolist())
