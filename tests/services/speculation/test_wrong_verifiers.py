"""The checks of losslessness find the mistakes that they are there for: wrong verifiers are refuted."""

from __future__ import annotations

import torch
from torch import Tensor

from services.models.sampling import draw
from services.speculation.tree import chain, tree_shape
from services.speculation.verify import Verified, residual, verify_chain, verify_tree
from tests.services.speculation.enumeration import (
    Conditional,
    NotConstantError,
    Outcomes,
    Verify,
    draw_outcomes,
    one_hot_outcomes,
)
from tests.services.speculation.laws import (
    PLAIN,
    PROCESSED,
    by_hand,
    gap,
    processed,
    random_logits,
    row,
    tree,
)


def refuted(outcomes: Outcomes, target: Conditional, verify: Verify) -> bool:
    try:
        return gap(outcomes, target, target, verify) > 1e-3
    except NotConstantError:  # it accepts or draws at other points than it should
        return True


def rejects_to_target(t: Tensor, tokens: Tensor, q: Tensor | None, lengths: Tensor, u: Tensor) -> Verified:
    """Row 17: on rejection drawn from the target instead of the residual."""
    v = verify_chain(t, tokens, q, lengths, u)
    final = t[torch.arange(len(t)), v.num_accepted_tokens]
    return Verified(v.num_accepted_tokens, v.path, draw(final, u[:, -1]))


def counts_all_accepts(t: Tensor, tokens: Tensor, q: Tensor | None, lengths: Tensor, u: Tensor) -> Verified:
    """Row 8: accepted = sum of the mask, tokens after the first rejection included."""
    assert q is not None
    n = tokens.shape[1]
    p_x, q_x = (x.gather(-1, tokens[..., None])[..., 0] for x in (t[:, :n], q))
    count = (u[:, :n] * q_x < p_x).sum(-1)
    path = torch.minimum(torch.arange(1, n + 1).expand(len(t), n), count[:, None])
    at = torch.arange(len(t))
    rejected = count < n
    final = torch.where(rejected[:, None], residual(t[at, count], q[at, count.clamp_max(n - 1)]), t[at, count])
    return Verified(count, path, draw(final, u[:, -1]))


def takes_one_hot_for_sampled(t: Tensor, tokens: Tensor, q: Tensor | None, lengths: Tensor, u: Tensor) -> Verified:
    """Argmax drafts checked against a softmax they were not drawn from."""
    fake = torch.full((*tokens.shape, t.shape[-1]), 1 / t.shape[-1], dtype=t.dtype)
    return verify_chain(t, tokens, fake, lengths, u)


def shares_one_uniform(t: Tensor, tokens: Tensor, q: Tensor | None, lengths: Tensor, u: Tensor) -> Verified:
    """The final draw reuses the first accept number: each is uniform, together they are not."""
    return verify_chain(t, tokens, q, lengths, torch.cat([u[:, :-1], u[:, :1]], 1))


def uniform_law_gap(verify: Verify) -> float:
    """By a fine grid over two uniforms, for verifiers that break the enumeration's independence."""
    target, drafter = processed(random_logits(1, 4), PLAIN), random_logits(2, 4)
    outcomes = draw_outcomes(chain(1), drafter, row(PLAIN))
    u = (torch.cartesian_prod(torch.arange(300), torch.arange(300)).double() + 0.5) / 300
    law = torch.zeros(4, dtype=torch.float64)
    for i, w in enumerate(outcomes.weight.tolist()):
        o = outcomes.take(torch.full((len(u),), i))
        table = torch.stack([target(()), target(tuple(outcomes.tokens[i].tolist()))]).expand(len(u), -1, -1)
        v = verify(table, o.tokens, o.probs, o.lengths, u)
        first = torch.where(v.num_accepted_tokens > 0, o.tokens[:, 0], v.next_token)
        law += torch.bincount(first, minlength=4) / len(u) * w
    return float((law - target(())).abs().max())


def test_row_17_the_check_catches_wrong_chain_verifiers() -> None:
    target = processed(random_logits(1, 4), PLAIN)
    sampled = draw_outcomes(chain(2), random_logits(2, 4), row(PLAIN))
    one_hot = one_hot_outcomes(chain(2), 4)
    assert gap(sampled, target, target) < 1e-6 and gap(one_hot, target, target) < 1e-6
    assert gap(sampled, target, target, rejects_to_target) > 1e-2
    assert gap(one_hot, target, target, rejects_to_target) > 1e-2
    assert gap(sampled, target, target, counts_all_accepts) > 1e-2
    assert refuted(one_hot, target, takes_one_hot_for_sampled)
    assert gap(sampled, target, target, lambda t, x, q, n, u: verify_chain(t, x, q, n, u, 0.3)) > 1e-3  # lossy
    assert uniform_law_gap(verify_chain) < 5e-3 < 2e-2 < uniform_law_gap(shares_one_uniform)


def test_row_13_the_check_catches_an_unprocessed_target() -> None:
    logits = random_logits(1, 4)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        p = PROCESSED[name]
        outcomes = draw_outcomes(chain(2), random_logits(2, 4), row(p))
        assert gap(outcomes, processed(logits, PLAIN), by_hand(logits, p)) > 1e-2


def test_row_14_the_check_catches_a_filter_on_the_bonus_only() -> None:
    logits, p = random_logits(1, 4), PROCESSED["min_p"]
    raw, filtered = processed(logits, PLAIN), processed(logits, p)
    outcomes = draw_outcomes(chain(2), random_logits(2, 4), row(PLAIN))
    assert gap(outcomes, lambda s: filtered(s) if len(s) == 2 else raw(s), by_hand(logits, p)) > 1e-2


def test_row_17_the_check_catches_wrong_tree_verifiers() -> None:
    s = tree_shape(2, 2, 5)
    target = processed(random_logits(11, 4), PLAIN)
    outcomes = draw_outcomes(s, random_logits(12, 4), row(PLAIN))
    first = [next(c[0] for c in s.children if node in c) for node in range(1, s.num_nodes)]

    def with_replacement(t: Tensor, x: Tensor, q: Tensor | None, n: Tensor, u: Tensor) -> Verified:
        assert q is not None  # each sibling checked against the distribution of the first
        return verify_tree(t, x, q[:, [f - 1 for f in first]], n, s, u)

    def rejects(t: Tensor, x: Tensor, q: Tensor | None, n: Tensor, u: Tensor) -> Verified:
        v = verify_tree(t, x, q, n, s, u)
        end = torch.where(v.num_accepted_tokens > 0, v.path[:, -1], 0)
        return Verified(v.num_accepted_tokens, v.path, draw(t[torch.arange(len(t)), end], u[:, -1]))

    assert gap(outcomes, target, target, tree(s)) < 1e-6
    assert gap(outcomes, target, target, rejects) > 1e-2
    assert refuted(outcomes, target, with_replacement) and not refuted(outcomes, target, tree(s))
