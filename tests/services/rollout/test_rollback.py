"""Losslessness 4: what a row holds after rejections, tree compaction, moves and sharing equals a fresh prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.core.types import SamplingParams
from services.models.target import TargetModel
from services.rollout.eagle import EagleDrafting
from services.rollout.native import NativeEngine
from services.rollout.rows import Rows
from services.speculation.drafting import Draft
from services.speculation.strategy import DraftStrategy
from services.speculation.verify import Verified
from tests.services.models.tiny import (
    FAMILIES,
    contrary_drafter,
    markov_model,
    perfect_drafter,
    random_drafter,
    spec_of,
    tensors_of,
    tiny_model,
    tiny_target,
)
from tests.services.rollout.engines import (
    CHAINS,
    EVERY,
    TREES,
    Scripted,
    Switching,
    draft_now,
    group,
    make_engine,
    prompts,
)

VOCAB = 32
SAMPLED = SamplingParams(temperature=1.0, max_tokens=30)


def fresh_rows(engine: NativeEngine, model, drafter) -> Rows:
    """Each running sequence prefilled on its own, as one prompt."""
    sequences = [[*r.work.prompt.token_ids, *r.response_ids] for r in engine._requests]
    rows = Rows(tiny_target(model), len(sequences), 64, engine._options.spare_columns)
    for ids in sequences:
        rows.add_group(ids, 1)
    if drafter is not None and min(map(len, sequences)) > 1:
        eagle = EagleDrafting(rows)
        eagle.load(drafter)
        eagle.feed(eagle.missing().tolist())
    return rows


@torch.no_grad()
def check_rows(engine: NativeEngine, model, drafter=None) -> None:
    rows, fresh = engine._rows, fresh_rows(engine, model, drafter)
    assert rows.count == fresh.count == engine.num_running > 0
    for r, request in enumerate(engine._requests):
        known = [*request.work.prompt.token_ids, *request.response_ids]
        assert rows.lengths[r] == len(known) and rows.tokens[r, : len(known)].tolist() == known
        end = len(known) - 1
        for layer, expected in zip(rows.kv.layers, fresh.kv.layers, strict=True):
            assert (layer[r, :end] - expected[r, :end]).abs().max() < 1e-5
        assert (rows.hidden[r, :end] - fresh.hidden[r, :end]).abs().max() < 1e-5
        drafted = int(rows.drafted[r])
        assert 0 <= drafted <= end
        if drafted and drafter is not None:
            gap = rows.draft_kv.layers[0][r, :drafted] - fresh.draft_kv.layers[0][r, :drafted]
            assert gap.abs().max() < 1e-5


def start(kind: str, selector, drafter, **options):
    model = tiny_model(kind, VOCAB, 2, 1.0)
    return model, make_engine(model, selector, drafter and drafter(spec_of(model)), **options)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("s", [s for s in EVERY if s.drafter != "suffix"], ids=lambda s: s.name)
@pytest.mark.parametrize("drafter", [random_drafter, contrary_drafter])
def test_every_round_leaves_what_a_prefill_would(kind: str, s: DraftStrategy, drafter) -> None:
    model, engine = start(kind, s, drafter)
    engine.submit(
        [group(ids, 1 + n % 2, SAMPLED, first_seed=10 * n) for n, ids in enumerate(prompts(VOCAB, 3, seed=1))]
    )
    for _ in range(2):
        engine.step()
        engine.step()
        check_rows(engine, model, drafter(spec_of(model)))


class Watched(NativeEngine):
    """Counts the accepted paths that tree compaction had to move."""

    moved = 0

    def _verify(self, draft: Draft) -> tuple[Verified, Tensor]:
        verified, logprobs = super()._verify(draft)
        straight = torch.arange(1, verified.path.shape[1] + 1).expand_as(verified.path)
        taken = straight <= verified.num_accepted_tokens[:, None]
        self.moved += int(((verified.path != straight) & taken).any(1).sum())
        return verified, logprobs


@pytest.mark.parametrize("s", TREES, ids=lambda s: s.name)
def test_after_tree_compaction(s: DraftStrategy) -> None:
    """A drafter that is often right, off the straight path too: accepted nodes lie apart and are moved together."""
    model = markov_model("llama", VOCAB, 1, 0.4)
    drafter = perfect_drafter(spec_of(model))
    drafter["fc.weight"] += 0.12 * torch.randn(drafter["fc.weight"].shape, generator=torch.Generator().manual_seed(0))
    engine = make_engine(model, s, drafter, engine_class=Watched)
    engine.submit([group(ids, 2, SAMPLED, first_seed=10 * n) for n, ids in enumerate(prompts(VOCAB, 4, seed=3))])
    for _ in range(6):
        engine.step()
        if engine.num_running:
            check_rows(engine, model, drafter)
    assert isinstance(engine, Watched) and engine.moved > 0, "no accepted path had to be moved: nothing is shown"


def test_after_row_moves() -> None:
    """Short responses end first; the last row moves into each gap, in the middle of its own response."""
    model, engine = start("qwen3", Switching(EVERY, seed=2), random_drafter)
    budgets = (2, 30, 5, 30, 1, 9, 30, 3)
    engine.submit(
        [
            group(ids, 1, SamplingParams(max_tokens=budget), first_seed=n)
            for n, (ids, budget) in enumerate(zip(prompts(VOCAB, 8, seed=5), budgets, strict=True))
        ]
    )
    ended = 0
    for _ in range(12):
        ended += len(engine.step())
        if engine.num_running:
            check_rows(engine, model, random_drafter(spec_of(model)))
    assert ended >= 4


class Counted(TargetModel):
    """Remembers the shape of every forward pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.passes: list[tuple[int, ...]] = []

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.passes.append(tuple(ids.shape))
        return super().forward(ids, *args, **kwargs)


def test_groups_share_one_prefill() -> None:
    model, engine = start("qwen2", TREES[1], random_drafter, target_class=Counted)
    engine.submit([group((3, 1, 4, 1, 5, 9, 2, 6), 6, SAMPLED)])
    engine.step()
    nodes = TREES[1].shape.num_nodes
    # the prompt but its last token, once; then one verify step for the whole group
    assert isinstance(engine._target, Counted) and engine._target.passes == [(1, 7), (6, nodes)]
    check_rows(engine, model, random_drafter(spec_of(model)))


def test_rows_are_reused_without_traces() -> None:
    """A later request in the columns of earlier, longer ones; then after an abort."""
    model, engine = start("llama", Switching(EVERY, seed=1), random_drafter, rows=2)
    engine.submit(
        [
            group(ids, 1, SamplingParams(max_tokens=(20, 3)[n % 2]), first_seed=n)
            for n, ids in enumerate(prompts(VOCAB, 6, seed=6))
        ]
    )
    for _ in range(30):
        engine.step()
        if engine.num_running:
            check_rows(engine, model, random_drafter(spec_of(model)))
    engine.abort()
    engine.submit([group((1, 2), 2, SAMPLED)])
    engine.step()
    check_rows(engine, model)


def test_after_loads_of_both_kinds() -> None:
    model, engine = start("qwen3", Switching(EVERY, seed=4), random_drafter)
    other = tiny_model("qwen3", VOCAB, 3, 1.0)
    engine.submit([group(ids, 2, SAMPLED, first_seed=n) for n, ids in enumerate(prompts(VOCAB, 4, seed=7))])
    for _ in range(3):
        engine.step()
    engine.load_policy(1, tensors_of(other))
    check_rows(engine, other)
    for _ in range(2):
        engine.step()
    drafter = random_drafter(spec_of(model), seed=9)
    engine.load_drafter(1, drafter)
    assert (engine._rows.drafted == 0).all()
    for _ in range(3):
        engine.step()
        check_rows(engine, other, drafter)


def test_ragged_suffix_drafts_roll_back() -> None:
    model, engine = start("llama", EVERY[-1], None, index=Scripted(lambda t, d: [len(t) % VOCAB] * (len(t) % (d + 1))))
    engine.submit([group(ids, 1, SAMPLED, first_seed=n) for n, ids in enumerate(prompts(VOCAB, 5, seed=8, shortest=1))])
    for _ in range(6):
        engine.step()
        check_rows(engine, model)


@pytest.mark.parametrize("s", [CHAINS[2], TREES[3]], ids=lambda s: s.name)
def test_drafts_do_not_depend_on_how_the_drafter_came_there(s: DraftStrategy) -> None:
    """Caught up token by token or at once, beside others or alone: the same proposals."""
    model, engine = start("qwen3", s, random_drafter)
    engine.submit([group(ids, 1, SAMPLED, first_seed=n) for n, ids in enumerate(prompts(VOCAB, 3, seed=9))])
    for _ in range(4):
        engine.step()
    argmax = DraftStrategy(s.name, s.drafter, s.depth, s.topk, s.num_draft_tokens, sampled=False)
    with torch.no_grad():
        after = draft_now(engine, argmax)
        fresh = EagleDrafting(fresh_rows(engine, model, None))
        fresh.load(random_drafter(spec_of(model)))
        assert torch.equal(draft_now(engine, argmax, fresh).tokens, after.tokens)
