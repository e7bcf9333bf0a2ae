"""What the EAGLE drafter proposes: losslessness hides a wrong drafter (it is slow, never wrong), so its distributions
are checked against the network run plainly, the whole sequence again for each node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.core.types import SamplingParams
from services.models.eagle import Eagle
from services.models.kv import KVStore
from services.models.layers import RopeTable
from services.models.sampling import process_logits, sampling_tensors
from services.rollout.native import NativeEngine
from services.speculation.strategy import DraftStrategy
from tests.services.models.tiny import CPU, FAMILIES, causal_mask, in_float64, random_drafter, spec_of, tiny_model
from tests.services.rollout.engines import CHAINS, TREES, draft_now, group, make_engine, prompts

VOCAB = 32
# All in float64, where rounding explains no more than this: in float32, logits as loud as these come out 1e-3 apart.
TOLERANCE = 1e-9
MIXED = (SamplingParams(max_tokens=30), SamplingParams(temperature=0.6, top_k=9, max_tokens=30))


def plain_logits(
    model: PreTrainedModel, drafter: dict[str, Tensor], known: Sequence[int], path: Sequence[int]
) -> Tensor:
    """Draft logits behind `known` + `path`: entry t joins token t + 1 with the hidden state of t, at position t; past
    the known tokens the drafter's own output stands in for the target's hidden state. In the model's number format."""
    spec = spec_of(model)
    states = model.model(input_ids=torch.tensor([list(known)])).last_hidden_state[0, :-1]
    network = Eagle(spec).network({name: t.to(model.dtype) for name, t in drafter.items()})
    for drawn in range(len(path) + 1):
        ids = torch.tensor([[*known[1:], *path[:drawn]]])
        length = ids.shape[1]
        at = torch.arange(length)[None]
        attend = KVStore(spec, 1, 1, length, CPU, model.dtype).attend(0, at, causal_mask(0, length).to(model.dtype))
        rope = RopeTable(spec, length, CPU, model.dtype).at(at)
        embeds = model.model.embed_tokens(ids)
        out = network.step(embeds, states[None], rope, attend).predicted
        states = torch.cat([states, out[0, -1:]])
    return model.lm_head(states[-1])


def running(kind: str, s: DraftStrategy) -> tuple[PreTrainedModel, dict[str, Tensor], NativeEngine]:
    """Ragged rows some rounds into their responses, so that catch-up, roll-back and compaction have been at work."""
    model = in_float64(tiny_model(kind, VOCAB, 2, 1.0))
    drafter = random_drafter(spec_of(model), 1.5)
    engine = make_engine(model, s, drafter)
    engine.submit([group(ids, 1, MIXED[n % 2], first_seed=10 * n) for n, ids in enumerate(prompts(VOCAB, 3, seed=1))])
    for _ in range(3):
        assert not engine.step()
    return model, drafter, engine


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("s", [*CHAINS, *TREES], ids=lambda s: s.name)
def test_every_node_is_drawn_from_the_networks_own_distribution(kind: str, s: DraftStrategy) -> None:
    model, drafter, engine = running(kind, s)
    draft = draft_now(engine, s)
    assert (draft.probs is not None) == s.sampled and draft.lengths.tolist() == [s.num_draft_tokens - 1] * 3
    for row, request in enumerate(engine._requests):
        known, tokens = [*request.work.prompt.token_ids, *request.response_ids], [-1, *draft.tokens[row].tolist()]
        for node, children in enumerate(draft.shape.children):
            if not children:
                continue
            logits = plain_logits(model, drafter, known, [tokens[n] for n in draft.shape.ancestors(node)[1:]])
            if draft.probs is None:
                chosen = logits[[tokens[c] for c in children]]
                assert (chosen - logits.topk(len(children)).values).abs().max() < TOLERANCE
                continue
            probs = process_logits(logits[None], sampling_tensors([request.sampling], CPU)).softmax(-1)[0]
            for child in children:  # each sibling from what the earlier ones left
                assert (draft.probs[row, child - 1] - probs).abs().max() < TOLERANCE, (s.name, row, node, child)
                probs = probs.clone()
                probs[tokens[child]] = 0
                left = float(probs.sum())
                least = torch.finfo(probs.dtype).tiny  # less is too little to divide by: no sibling
                probs = probs / left if left >= least else probs * 0


@torch.no_grad()
def test_the_check_sees_a_shift_of_one_position() -> None:
    """Of the check above: a network read one token too early is told apart by far more than its tolerance."""
    model, drafter, engine = running("qwen3", CHAINS[2])
    request = engine._requests[0]
    known = [*request.work.prompt.token_ids, *request.response_ids]
    right, early = plain_logits(model, drafter, known, [3]), plain_logits(model, drafter, [*known, 3], [])
    assert (right.softmax(-1) - early.softmax(-1)).abs().max() > 1e-2


@torch.no_grad()
def test_rows_in_need_of_several_catch_up_chunks_draft_alike() -> None:
    """A long prompt beside a short one: padding of the longer catch-up must not reach the shorter row."""
    model = in_float64(tiny_model("llama", VOCAB, 2, 1.0, max_position_embeddings=1024))
    drafter = random_drafter(spec_of(model), 1.5)
    engine = make_engine(model, CHAINS[2], drafter, max_len=400)
    long = tuple((7 * n + n * n) % VOCAB for n in range(300))
    engine.submit([group(ids, 1, MIXED[0], first_seed=n) for n, ids in enumerate([(1, 2, 3), long])])
    engine._admit()
    for _ in range(2):
        draft = draft_now(engine, CHAINS[2])
        assert draft.probs is not None
        for row, request in enumerate(engine._requests):
            known = [*request.work.prompt.token_ids, *request.response_ids]
            expected = plain_logits(model, drafter, known, []).softmax(-1)
            assert (draft.probs[row, 0] - expected).abs().max() < TOLERANCE
        engine.step()
