"""Losslessness by exact enumeration: the law of what verification commits is the target's chain rule, to 1e-6."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.core.types import SamplingParams
from services.models.sampling import draw, process_logits, sampling_tensors
from services.speculation.drafting import Draft, appended
from services.speculation.tree import TreeShape, chain, level_order, tree_shape
from services.speculation.verify import leading_accepts, residual, verify_chain, verify_tree
from tests.services.models.tiny import CPU
from tests.services.speculation.enumeration import (
    Conditional,
    Outcomes,
    committed,
    draw_outcomes,
    one_hot_outcomes,
)
from tests.services.speculation.laws import (
    PLAIN,
    PROCESSED,
    by_hand,
    gap,
    masked_logits,
    processed,
    random_logits,
    row,
    tree,
)

# -- chains


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", PROCESSED)
def test_rows_13_14_17_sampled_chains_follow_the_processed_target(depth: int, name: str) -> None:
    vocab, p = (5 if depth < 3 else 4), PROCESSED[name]
    target, drafter = random_logits(1, vocab), random_logits(2, vocab)
    outcomes = draw_outcomes(chain(depth), drafter, row(p))
    assert gap(outcomes, processed(target, p), by_hand(target, p)) < 1e-6


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", PROCESSED)
def test_rows_13_14_17_every_single_one_hot_chain_is_lossless(depth: int, name: str) -> None:
    vocab, p = (6, 5, 4)[depth - 1], PROCESSED[name]
    target = random_logits(3, vocab)
    outcomes = one_hot_outcomes(chain(depth), vocab)
    assert gap(outcomes, processed(target, p), by_hand(target, p)) < 1e-6


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("sampled", [True, False])
def test_row_19_ragged_chains_and_the_empty_draft(length: int, sampled: bool) -> None:
    """Rows shorter than the batch's longest draft: what lies past their length is padding, never a draft."""
    target, vocab = processed(random_logits(4, 4), PLAIN), 4
    if sampled:
        outcomes = draw_outcomes(chain(3), random_logits(5, vocab), row(PLAIN))
        outcomes.lengths.fill_(length)
    else:
        outcomes = one_hot_outcomes(chain(3), vocab, length)
    assert gap(outcomes, target, target) < 1e-6
    assert all(max(map(len, law)) == length + 1 for law in committed(outcomes, target, verify_chain))


def test_row_19_a_draft_of_no_tokens_is_a_decode_step() -> None:
    target = processed(random_logits(6, 5), PLAIN)
    (law,) = committed(one_hot_outcomes(chain(0), 5), target, verify_chain)
    assert max(abs(law.get((t,), 0.0) - float(target(())[t])) for t in range(5)) < 1e-6
    assert set(map(len, law)) == {1}


HALF = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
FIRST = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf], dtype=torch.float64)
AWKWARD: dict[str, tuple[Conditional, Conditional]] = {
    "identical": (random_logits(7, 4), random_logits(7, 4)),
    "disjoint": (
        masked_logits(random_logits(7, 4), lambda p: HALF),
        masked_logits(random_logits(8, 4), lambda p: 1 - HALF),
    ),
    "zeros in the target": (masked_logits(random_logits(7, 4), lambda p: HALF.roll(len(p))), random_logits(8, 4)),
    "zeros in the drafter": (random_logits(7, 4), masked_logits(random_logits(8, 4), lambda p: HALF.roll(len(p)))),
    "certain target": (lambda p: FIRST, random_logits(8, 4)),
    "certain drafter": (random_logits(8, 4), lambda p: FIRST),
    "far apart": (random_logits(7, 4, 6.0), random_logits(8, 4, 6.0)),
}
SHAPES = {"chain 2": chain(2), "chain 3": chain(3), "topk 2": tree_shape(2, 2, 5), "topk 3": tree_shape(2, 3, 5)}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("shape", SHAPES)
def test_awkward_distributions(name: str, shape: str) -> None:
    target, drafter = AWKWARD[name]
    probs, s = processed(target, PLAIN), SHAPES[shape]
    outcomes = draw_outcomes(s, drafter, row(PLAIN))
    assert gap(outcomes, probs, probs, verify_chain if s.is_chain else tree(s)) < 1e-6


def test_identical_distributions_accept_everything() -> None:
    target, drafter = AWKWARD["identical"]
    (law,) = committed(draw_outcomes(chain(3), drafter, row(PLAIN)), processed(target, PLAIN), verify_chain)
    assert abs(sum(w for said, w in law.items() if len(said) == 4) - 1) < 1e-6


def test_acceptance_is_the_sum_of_minima() -> None:
    """What a sampled draft is for: accepted with sum(min(target, draft)), an argmax draft with the target's share."""
    target, drafter = random_logits(1, 5), random_logits(2, 5)
    p, q = processed(target, PLAIN)(()), processed(drafter, PLAIN)(())
    (law,) = committed(draw_outcomes(chain(1), drafter, row(PLAIN)), processed(target, PLAIN), verify_chain)
    accepted = sum(w for said, w in law.items() if len(said) == 2)
    assert abs(accepted - float(torch.minimum(p, q).sum())) < 1e-6
    laws = committed(one_hot_outcomes(chain(1), 5), processed(target, PLAIN), verify_chain)
    for token, law in enumerate(laws):
        assert abs(sum(w for said, w in law.items() if len(said) == 2) - float(p[token])) < 1e-6


# -- trees

TREES = {
    "two children": (TreeShape((-1, 0, 0)), 5),
    "three children": (TreeShape((-1, 0, 0, 0)), 5),
    "2x2 of five": (tree_shape(2, 2, 5), 4),
    "2x2 full": (TreeShape((-1, 0, 0, 1, 1, 2, 2)), 3),
    "2x3 of six": (tree_shape(2, 3, 6), 3),
    "3x2 of six": (tree_shape(3, 2, 6), 3),
    "late sibling": (TreeShape((-1, 0, 1, 0, 3)), 4),  # a child comes before its parent's second sibling
    "chain": (chain(3), 3),
    "3x2 level by level": (level_order(tree_shape(3, 2, 6)), 3),  # as the EAGLE drafter numbers its nodes
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", ["plain", "top_p", "all"])
def test_sampled_trees_with_children_without_replacement(shape: str, name: str) -> None:
    s, vocab = TREES[shape]
    p, target, drafter = PROCESSED[name], random_logits(11, vocab), random_logits(12, vocab)
    outcomes = draw_outcomes(s, drafter, row(p))
    for kids in s.children:
        for i, a in enumerate(kids):
            for b in kids[i + 1 :]:  # a surplus sibling has no distribution and may repeat a token
                real = outcomes.probs[:, b - 1].sum(-1) > 0  # type: ignore[index]
                assert not (real & (outcomes.tokens[:, a - 1] == outcomes.tokens[:, b - 1])).any()
    assert gap(outcomes, processed(target, p), by_hand(target, p), tree(s)) < 1e-6


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", ["plain", "top_p", "min_p", "greedy"])
def test_every_single_one_hot_tree_is_lossless(shape: str, name: str) -> None:
    s, vocab = TREES[shape]
    p, target = PROCESSED[name], random_logits(13, vocab)
    outcomes = one_hot_outcomes(s, vocab)
    some = torch.randperm(len(outcomes.weight), generator=torch.Generator().manual_seed(0))[:40]
    assert gap(outcomes.take(some), processed(target, p), by_hand(target, p), tree(s)) < 1e-6


def test_more_siblings_than_the_drafter_has_tokens() -> None:
    """top_k 2 leaves two tokens; the third and fourth sibling have no distribution and must never be accepted."""
    s, p = TreeShape((-1, 0, 0, 0, 0)), SamplingParams(top_k=2)
    target, drafter = random_logits(14, 5), random_logits(15, 5)
    outcomes = draw_outcomes(s, drafter, row(p))
    assert (outcomes.probs[:, 2:].sum(-1) == 0).all()  # type: ignore[index]
    plain = processed(target, PLAIN)  # unfiltered, so that refusing a real token would show
    assert gap(outcomes, plain, plain, tree(s)) < 1e-6


@pytest.mark.parametrize("gap_in_logits", [16.0, 60.0, 86.0, 90.0, 95.0, 102.0, 110.0, 400.0])
def test_siblings_of_a_nearly_certain_drafter(gap_in_logits: float) -> None:
    """Float32 as in the engine: what the first sibling leaves may be too small a number to be divided by (at
    temperature 0.1 a gap of 9 logits does it). A sibling drawn from it must be recorded as it was drawn, or refused."""
    s = TreeShape((-1, 0, 0))
    target = processed(random_logits(16, 4), PLAIN)
    sure = torch.tensor([0.0, -gap_in_logits, -gap_in_logits - 1, -gap_in_logits - 2], dtype=torch.float32)
    outcomes = draw_outcomes(s, lambda prefix: sure, row(PLAIN))
    assert gap(outcomes, target, target, tree(s)) < 1e-6


@pytest.mark.parametrize("length", range(6))
@pytest.mark.parametrize("sampled", [True, False])
def test_trees_cut_to_any_number_of_nodes(length: int, sampled: bool) -> None:
    """Nodes past a row's length are padding: never asked, and their distributions take nothing from the target."""
    s, target = level_order(tree_shape(3, 2, 6)), processed(random_logits(19, 3), PLAIN)
    if sampled:
        outcomes = draw_outcomes(s, random_logits(20, 3), row(PLAIN))
        outcomes.lengths.fill_(length)
    else:
        outcomes = one_hot_outcomes(s, 3, length)
    assert gap(outcomes, target, target, tree(s)) < 1e-6
    deepest = max(s.depths[: length + 1])
    assert all(max(map(len, law)) == deepest + 1 for law in committed(outcomes, target, tree(s)))


# -- chains of two origins


def continued(outcomes: Outcomes, drawn: int, behind: Callable[[list[int]], list[int]]) -> Outcomes:
    """The first `drawn` tokens of each chain, and what `behind` says follows them."""
    lengths = torch.full_like(outcomes.lengths, drawn)
    draft = Draft(outcomes.shape, outcomes.tokens, outcomes.probs, lengths)
    out = appended(draft, [behind(tokens[:drawn]) for tokens in outcomes.tokens.tolist()])
    return Outcomes(out.shape, outcomes.weight, out.tokens, out.probs, out.lengths)


def copied(drawn: list[int]) -> list[int]:
    """A suffix found behind the drawn tokens: tokens and number of them follow from those."""
    return [(sum(drawn) + i) % 4 for i in range((7 * sum(drawn) + len(drawn)) % 3)]


@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_drawn_chains_continued_by_what_follows_them(drawn: int, name: str) -> None:
    p = PROCESSED[name]
    target = random_logits(21, 4)
    outcomes = continued(draw_outcomes(chain(2), random_logits(22, 4), row(p)), drawn, copied)
    assert gap(outcomes, processed(target, p), by_hand(target, p)) < 1e-6


@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_argmax_chains_continued_by_what_follows_them(drawn: int) -> None:
    target = processed(random_logits(21, 4), PLAIN)
    assert gap(continued(one_hot_outcomes(chain(2), 4), drawn, copied), target, target) < 1e-6


def test_the_check_catches_a_chain_that_is_kept_for_its_luck() -> None:
    """Given up for the suffix, or cut, because of the token that was drawn: no longer the target's law."""
    target = processed(random_logits(21, 4), PLAIN)
    outcomes = draw_outcomes(chain(2), random_logits(22, 4), row(PLAIN))
    outcomes.lengths[outcomes.tokens[:, 0] > 1] = 0
    assert gap(outcomes, target, target) > 1e-2


def test_a_batch_of_both_origins_is_its_rows_apart() -> None:
    """One row drawn, one drawn and continued, one from the suffix alone, one empty: each as if it were alone."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 5, (4, 2), generator=g)
    probs = torch.randn(4, 2, 5, generator=g).softmax(-1)
    drawn, rows = torch.tensor([2, 2, 0, 0]), [[], [3], [1, 4, 2], []]
    both = appended(Draft(chain(2), tokens, probs, drawn), rows)
    assert both.lengths.tolist() == [2, 3, 3, 0] and both.shape == chain(3) and both.probs is not None
    target, u = torch.randn(4, 4, 5, generator=g).softmax(-1), torch.rand(4, 4, generator=g, dtype=torch.float64)
    together = verify_chain(target, both.tokens, both.probs, both.lengths, u)
    for r in range(4):
        alone = [*tokens[r, : drawn[r]].tolist(), *rows[r]]
        n = len(alone)
        one_hot = torch.eye(5)[torch.tensor(rows[r], dtype=torch.long)]
        q = torch.cat([probs[r, : drawn[r]], one_hot])[None]
        numbers = torch.cat([u[r, :n], u[r, 3:]])[None]
        v = verify_chain(
            target[r : r + 1, : n + 1], torch.tensor([alone], dtype=torch.long), q, torch.tensor([n]), numbers
        )
        assert v.num_accepted_tokens == together.num_accepted_tokens[r] and v.next_token == together.next_token[r]


@pytest.mark.parametrize("shape", [chain(1), chain(3)])
def test_a_chain_is_verified_alike_as_chain_and_as_tree(shape: TreeShape) -> None:
    g = torch.Generator().manual_seed(2)
    rows, vocab, n = 400, 5, shape.num_nodes - 1
    target = torch.randn(rows, n + 1, vocab, generator=g).softmax(-1)
    q = torch.randn(rows, n, vocab, generator=g).softmax(-1)
    tokens = draw(q.flatten(0, 1), torch.rand(rows * n, generator=g, dtype=torch.float64)).unflatten(0, (rows, n))
    u = torch.rand(rows, n + 1, generator=g, dtype=torch.float64)
    for probs in (q, None):
        a = verify_chain(target, tokens, probs, torch.full((rows,), n), u)
        b = verify_tree(target, tokens, probs, torch.full((rows,), n), shape, u)
        assert torch.equal(a.num_accepted_tokens, b.num_accepted_tokens)
        assert torch.equal(a.path, b.path) and torch.equal(a.next_token, b.next_token)


# -- single cases


def test_row_8_accepts_after_the_first_rejection_do_not_count() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    assert leading_accepts(mask).tolist() == [1, 4, 0, 2]
    assert leading_accepts(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


@given(st.lists(st.booleans(), max_size=8))
def test_row_8_any_mask(mask: list[bool]) -> None:
    expected = mask.index(False) if False in mask else len(mask)
    assert leading_accepts(torch.tensor([mask], dtype=torch.bool).reshape(1, -1)).item() == expected


def test_row_15_a_greedy_row_beside_a_sampled_one() -> None:
    """Temperature 0: accepted exactly while the draft is the argmax; never -1, never NaN."""
    logits = torch.tensor([[[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [0.0, 1.0, 5.0]]]).repeat(3, 1, 1)
    s = sampling_tensors([SamplingParams(temperature=0.0)] * 2 + [PLAIN], CPU).repeat(3)
    target = process_logits(logits.flatten(0, 1), s).softmax(-1).unflatten(0, (3, 3))
    tokens = torch.tensor([[1, 0], [1, 2], [1, 0]])
    u = torch.full((3, 3), 0.999999, dtype=torch.float64)
    for probs in (None, torch.zeros(3, 2, 3).scatter_(-1, tokens[..., None], 1.0)):
        v = verify_chain(target, tokens, probs, torch.tensor([2, 2, 2]), u)
        assert v.num_accepted_tokens[:2].tolist() == [2, 1] and v.next_token[:2].tolist() == [2, 0]
        assert 0 <= v.num_accepted_tokens[2] <= 2


@given(st.integers(0, 10_000))
def test_residual_is_a_distribution_without_what_was_refused(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(6, generator=g).mul(3).softmax(-1) for _ in range(2))
    p = torch.where(torch.rand(6, generator=g) < 0.4, 0.0, p)
    p = p / p.sum() if p.sum() > 0 else torch.eye(6)[0]
    rest = residual(p, q)
    assert torch.isclose(rest.sum(), torch.tensor(1.0), atol=1e-5) and (rest >= 0).all()
    if (p > q).any():
        assert (rest[p <= q] == 0).all()
    assert torch.equal(residual(p, p), p)  # nothing left: rejection has probability zero


@given(st.integers(0, 10_000), st.integers(0, 5), st.booleans())
def test_chain_answers_are_well_formed_for_any_input(seed: int, n: int, sampled: bool) -> None:
    """Float32 as in the engine, distributions with zeros and ragged lengths."""
    g = torch.Generator().manual_seed(seed)
    rows, vocab = 6, 5
    logits = torch.randn(rows, n + 1, vocab, generator=g) * 4
    target = logits.masked_fill(torch.rand(logits.shape, generator=g) < 0.3, -1e9).softmax(-1)
    q = torch.randn(rows, n, vocab, generator=g).softmax(-1)
    tokens = torch.randint(0, vocab, (rows, n), generator=g)
    lengths = torch.randint(0, n + 1, (rows,), generator=g)
    u = torch.rand(rows, n + 1, generator=g, dtype=torch.float64)
    v = verify_chain(target, tokens, q if sampled else None, lengths, u)
    assert (v.num_accepted_tokens >= 0).all() and (v.num_accepted_tokens <= lengths).all()
    at = target[torch.arange(rows), v.num_accepted_tokens]
    assert (at.gather(1, v.next_token[:, None]) > 0).all()
    assert (v.path <= v.num_accepted_tokens[:, None]).all()
    for r in range(rows):
        for j in range(int(v.num_accepted_tokens[r])):
            assert target[r, j, tokens[r, j]] > 0 and v.path[r, j] == j + 1


def test_row_18_a_threshold_accepts_more_and_is_off_by_default() -> None:
    target = torch.tensor([[[0.4, 0.6], [0.5, 0.5]]])
    tokens, u = torch.tensor([[0]]), torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    assert verify_chain(target, tokens, None, torch.tensor([1]), u).num_accepted_tokens.item() == 0
    assert verify_chain(target, tokens, None, torch.tensor([1]), u, 0.3).num_accepted_tokens.item() == 1
    assert verify_chain(target, tokens, None, torch.tensor([1]), u, 0.5).num_accepted_tokens.item() == 0
