"""Packed or dense, the target's pass over draft nodes is the same."""

from __future__ import annotations

import pytest
import torch

from services.core.types import SamplingParams
from services.models.sampling import sampling_tensors
from services.rollout import nodes
from services.rollout.nodes import node_logprobs
from services.rollout.rows import Rows
from services.speculation.drafting import Draft
from services.speculation.tree import TreeShape, level_order, tree_shape
from tests.services.models.tiny import CPU, FAMILIES, random_drafter, spec_of, tiny_model, tiny_target
from tests.services.rollout.engines import EVERY, Switching, check_all, finish, group, make_engine, prompts

VOCAB = 32
PARAMS = [SamplingParams(), SamplingParams(temperature=0.6, top_k=5), SamplingParams(temperature=0.0)]
SHAPES = {"chain": tree_shape(4, 1, 5), "tree": level_order(tree_shape(3, 2, 7)), "root": TreeShape((-1,))}


def filled_rows(model) -> Rows:
    rows = Rows(tiny_target(model), 3, 64, 24)
    for ids in prompts(VOCAB, 3, seed=4):
        rows.add_group(list(ids), 1)
    return rows


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", SHAPES)
def test_packed_is_dense(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = tiny_model(kind, VOCAB, 2, 1.0), SHAPES[name]
    count = shape.num_nodes - 1
    tokens = torch.randint(0, VOCAB, (3, count), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([count, 0, count // 2])
    sampling = sampling_tensors(PARAMS, CPU).repeat(shape.num_nodes)
    found = []
    for worth in (0, 10**6):
        monkeypatch.setattr(nodes, "WORTH_PACKING", worth)
        rows = filled_rows(model)
        logprobs = node_logprobs(rows, Draft(shape, tokens, None, lengths), sampling)
        found.append((rows, logprobs))
    (packed, sparse), (dense, full) = found
    for r, (length, n) in enumerate(zip(lengths.tolist(), packed.lengths, strict=True)):
        here = slice(0, length + 1)
        both = sparse[r, here], full[r, here]
        assert torch.equal(both[0].isinf(), both[1].isinf()), "the same tokens are excluded"
        assert torch.allclose(both[0].exp(), both[1].exp(), atol=1e-5)
        assert torch.isinf(sparse[r, length + 1 :]).all()
        end = n - 1 + length + 1
        assert torch.allclose(packed.hidden[r, :end], dense.hidden[r, :end], atol=1e-5)
        for a, b in zip(packed.kv.layers, dense.kv.layers, strict=True):
            assert torch.allclose(a[r, :end], b[r, :end], atol=1e-5)


def test_always_packed_is_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "WORTH_PACKING", 0)
    model = tiny_model("qwen3", VOCAB, 2, 1.0)
    works = [
        group(ids, 2, SamplingParams(temperature=0.0, max_tokens=10 + n))
        for n, ids in enumerate(prompts(VOCAB, 5, seed=2, shortest=1))
    ]
    check_all(model, finish(make_engine(model, Switching(EVERY, seed=7), random_drafter(spec_of(model))), works))
