"""The exact law of what a verification commits: every draft outcome times every interval of every uniform.

The real functions run on one batch with the uniforms at the left ends of all intervals and again at the right ends.
Each accept decision and each inverse-CDF draw is monotone in its own uniform, so equal answers at both ends mean that
the answer is constant in between, and the interval's width is its exact probability.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.models.sampling import SamplingTensors
from services.speculation.drafting import draw_children
from services.speculation.tree import TreeShape
from services.speculation.verify import Verified

# prefix of token ids -> distribution (or logits) of the next token, float64 [V]
Conditional = Callable[[tuple[int, ...]], Tensor]
# target_probs [B,Q,V], draft_tokens [B,Q-1], draft_probs [B,Q-1,V] | None, lengths [B], uniforms [B,Q] -> Verified
Verify = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Verified]
Law = dict[tuple[int, ...], float]
State = tuple[dict[int, tuple[int, Tensor]], float]  # (node -> its token and the distribution it came from), weight

INSET = 1e-11  # how far inside an interval its ends are taken
NARROW = 1e-9  # intervals below this are rounding of a breakpoint


class NotConstantError(AssertionError):
    """An answer changed inside an interval: the function does not accept or draw where the mathematics says."""


@dataclass(frozen=True)
class Outcomes:
    """N draft outcomes: `weight` [N] their probability, `tokens` [N,Q-1], `probs` [N,Q-1,V] or None, `lengths` [N]."""

    shape: TreeShape
    weight: Tensor
    tokens: Tensor
    probs: Tensor | None
    lengths: Tensor

    def take(self, index: Tensor) -> Outcomes:
        probs = None if self.probs is None else self.probs[index]
        return Outcomes(self.shape, self.weight[index], self.tokens[index], probs, self.lengths[index])


def cells(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Breakpoints [N,K] in [0,1] -> left and right ends, and widths, of the K+1 intervals they cut, each [N,K+1]."""
    edge = torch.zeros(points.shape[0], 1, dtype=torch.float64)
    cuts = torch.cat([edge, points.clamp(0, 1).sort(-1).values, edge + 1], -1)
    return cuts[:, :-1] + INSET, cuts[:, 1:] - INSET, cuts.diff(dim=-1)


def normalised(x: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True)
    return torch.where(total > 0, x / total.clamp_min(1e-300), torch.zeros_like(x))


# -- draft outcomes, drawn by the real function


def draw_outcomes(shape: TreeShape, logits: Conditional, sampling: SamplingTensors) -> Outcomes:
    """All drafts that `draw_children` can draw on this shape, with their probabilities. `sampling` has one row."""
    vocab = len(logits(()))
    states: list[State] = [({}, 1.0)]
    for level in shape.levels:
        for node in level:
            states = [s for state in states for s in _grow(state, node, shape, logits, sampling)]
    count = shape.num_nodes - 1
    tokens = torch.tensor([[drawn[n][0] for n in range(1, count + 1)] for drawn, _ in states], dtype=torch.long)
    probs = torch.stack([torch.stack([drawn[n][1] for n in range(1, count + 1)]) for drawn, _ in states])
    assert probs.shape == (len(states), count, vocab)
    weight = torch.tensor([w for _, w in states], dtype=torch.float64)
    assert abs(float(weight.sum()) - 1) < 1e-7
    return Outcomes(shape, weight, tokens, probs, torch.full((len(states),), count))


def _grow(state: State, node: int, shape: TreeShape, logits: Conditional, sampling: SamplingTensors) -> list[State]:
    drawn, weight = state
    prefix = tuple(drawn[n][0] for n in shape.ancestors(node)[1:])
    children = shape.children[node]
    grown = []
    for share, tokens, probs in child_draws(logits(prefix), sampling, len(children)):
        new = {c: (int(t), q) for c, t, q in zip(children, tokens, probs, strict=True)}
        grown.append((drawn | new, weight * share))
    return grown


def child_draws(logits: Tensor, sampling: SamplingTensors, count: int) -> list[tuple[float, Tensor, Tensor]]:
    """Every outcome of `draw_children` on one distribution: (probability, tokens [count], probs [count,V]).

    Grown sibling by sibling: the breakpoints of the next uniform are the CDF of the distribution the real function
    says it will draw from next.
    """
    prefixes: list[tuple[float, list[float], list[float]]] = [(1.0, [], [])]
    for i in range(count):
        grown = []
        for share, left, right in prefixes:
            u = torch.tensor([left + [0.5] * (count - i)], dtype=torch.float64)
            _, probs = draw_children(logits[None], sampling, count, True, u)
            assert probs is not None
            cut = probs[0, i].double().cumsum(-1)
            lows, highs, widths = cells(cut[None, :-1] / cut[-1] if cut[-1] > 0 else cut[None, :0])
            for low, high, width in zip(lows[0].tolist(), highs[0].tolist(), widths[0].tolist(), strict=True):
                if width > NARROW:
                    grown.append((share * width, [*left, low], [*right, high]))
        prefixes = grown
    shares = [p[0] for p in prefixes]
    answers = []
    for side in (1, 2):
        u = torch.tensor([p[side] for p in prefixes], dtype=torch.float64)
        many = logits.expand(len(prefixes), -1)
        answers.append(draw_children(many, sampling.repeat(len(prefixes)), count, True, u))
    (tokens, probs), (again, _) = answers
    if not torch.equal(tokens, again):
        raise NotConstantError("a draft draw changed inside an interval")
    assert probs is not None
    return list(zip(shares, tokens, probs, strict=True))


def one_hot_outcomes(shape: TreeShape, vocab: int, length: int | None = None) -> Outcomes:
    """Every draft that an argmax or suffix drafter could propose (siblings differ); weight 1 each: the law must be
    right for each of them by itself."""
    count = shape.num_nodes - 1
    rows = [
        t
        for t in itertools.product(range(vocab), repeat=count)
        if all(len({t[c - 1] for c in kids}) == len(kids) for kids in shape.children)
    ]
    tokens = torch.tensor(rows, dtype=torch.long).reshape(len(rows), count)
    lengths = torch.full((len(rows),), count if length is None else length)
    return Outcomes(shape, torch.ones(len(rows), dtype=torch.float64), tokens, None, lengths)


# -- verification


def target_table(outcomes: Outcomes, target: Conditional) -> Tensor:
    """[N,Q,V]: the target's distribution at each node of each outcome."""
    known: dict[tuple[int, ...], Tensor] = {}
    paths = [outcomes.shape.ancestors(n)[1:] for n in range(outcomes.shape.num_nodes)]
    rows = []
    for tokens in outcomes.tokens.tolist():
        prefixes = [tuple(tokens[n - 1] for n in path) for path in paths]
        for prefix in prefixes:
            if prefix not in known:
                known[prefix] = target(prefix)
        rows.append(torch.stack([known[p] for p in prefixes]))
    return torch.stack(rows)


def rests(outcomes: Outcomes, table: Tensor) -> tuple[Tensor, Tensor]:
    """By hand, for breakpoints only: the accept ratio of each draft node when it is asked [N,Q-1], and what is left to
    draw from at each node once all its children are refused [N,Q,V]."""
    ratio = torch.zeros_like(outcomes.tokens, dtype=torch.float64)
    last = table.clone()
    for node, children in enumerate(outcomes.shape.children):
        for child in children:
            token = outcomes.tokens[:, child - 1, None]
            one_hot = torch.zeros_like(last[:, node]).scatter_(-1, token, 1.0)
            drawn_from = one_hot if outcomes.probs is None else outcomes.probs[:, child - 1]
            q = drawn_from.gather(-1, token)[:, 0]
            p = last[:, node].gather(-1, token)[:, 0]
            ratio[:, child - 1] = torch.where(q > 0, p / q.clamp_min(1e-300), 0.0)
            offered = outcomes.lengths > child - 1  # ragged chains: a node past the length is never asked
            left = (last[:, node] - drawn_from * (1.0 if outcomes.probs is not None else 2.0)).clamp_min(0)
            left = torch.where(left.sum(-1, keepdim=True) > 0, normalised(left), last[:, node])
            last[:, node] = torch.where(offered[:, None], left, last[:, node])
    return ratio, last


def committed(outcomes: Outcomes, target: Conditional, verify: Verify) -> list[Law]:
    """One law per distinct draft when drafts are one-hot, one law in all when they are sampled: probability of each
    committed sequence (accepted tokens and the next token)."""
    table = target_table(outcomes, target)
    ratio, last = rests(outcomes, table)
    nodes = ratio.shape[1]
    # stage 1: all accept patterns
    none = torch.zeros(len(ratio), 2, 0, dtype=torch.float64)  # a draft of no tokens has no accept numbers
    each = [cells(ratio[:, j : j + 1]) for j in range(nodes)]
    low, high, width = (torch.stack(parts, -1) for parts in zip(*each, strict=True)) if nodes else (none, none, none)
    pattern = torch.tensor(list(itertools.product((0, 1), repeat=nodes)), dtype=torch.long).reshape(2**nodes, nodes)
    source = torch.arange(len(ratio)).repeat_interleave(len(pattern))
    picks = pattern.repeat(len(ratio), 1)

    def pick(x: Tensor) -> Tensor:
        return x[source].gather(1, picks[:, None, :])[:, 0]

    weight = outcomes.weight[source] * pick(width).prod(-1)
    lows, highs, alive = pick(low), pick(high), (pick(width) > NARROW).all(-1)
    source, weight, lows, highs = source[alive], weight[alive], lows[alive], highs[alive]
    half = torch.full((len(source), 1), 0.5, dtype=torch.float64)
    first = _call(verify, outcomes, table, source, torch.cat([lows, half], 1))
    again = _call(verify, outcomes, table, source, torch.cat([highs, half], 1))
    if not (torch.equal(first.num_accepted_tokens, again.num_accepted_tokens) and torch.equal(first.path, again.path)):
        raise NotConstantError("acceptance changed inside an interval")
    # stage 2: all intervals of the final draw at the node where each pattern ended
    end = _end_node(first, outcomes)
    cuts = torch.cat([last[source, end].cumsum(-1), table[source, end].cumsum(-1)], -1)
    low_f, high_f, width_f = cells(cuts)
    times = low_f.shape[1]
    many = torch.arange(len(source)).repeat_interleave(times)
    alive = width_f.flatten() > NARROW
    many, low_f, high_f = many[alive], low_f.flatten()[alive], high_f.flatten()[alive]
    weight = weight[many] * width_f.flatten()[alive]
    first = _call(verify, outcomes, table, source[many], torch.cat([lows[many], low_f[:, None]], 1))
    again = _call(verify, outcomes, table, source[many], torch.cat([highs[many], high_f[:, None]], 1))
    if not torch.equal(first.next_token, again.next_token):
        raise NotConstantError("the final draw changed inside an interval")
    return _laws(outcomes, source[many], weight, first)


def _call(verify: Verify, outcomes: Outcomes, table: Tensor, source: Tensor, uniforms: Tensor) -> Verified:
    o = outcomes.take(source)
    return verify(table[source], o.tokens, o.probs, o.lengths, uniforms)


def _end_node(v: Verified, outcomes: Outcomes) -> Tensor:
    if not outcomes.shape.depth:
        return torch.zeros_like(v.num_accepted_tokens)
    at = (v.num_accepted_tokens - 1).clamp_min(0)
    return torch.where(v.num_accepted_tokens > 0, v.path.gather(1, at[:, None])[:, 0], 0)


def _laws(outcomes: Outcomes, source: Tensor, weight: Tensor, v: Verified) -> list[Law]:
    laws: dict[int, Law] = defaultdict(lambda: defaultdict(float))
    tokens = outcomes.tokens.tolist()
    for row, w, count, path, final in zip(
        source.tolist(),
        weight.tolist(),
        v.num_accepted_tokens.tolist(),
        v.path.tolist(),
        v.next_token.tolist(),
        strict=True,
    ):
        said = (*(tokens[row][n - 1] for n in path[:count]), final)
        laws[row if outcomes.probs is None else 0][said] += w
    return list(laws.values())


def extend(law: Mapping[tuple[int, ...], float], target: Conditional, count: int) -> Law:
    """The law of the first `count` tokens when what is not committed yet follows the target's chain rule."""
    out: Law = defaultdict(float)
    stack = list(law.items())
    while stack:
        said, w = stack.pop()
        if len(said) >= count:
            out[said[:count]] += w
        else:
            stack.extend(((*said, t), w * p) for t, p in enumerate(target(said).tolist()) if p)
    return out


def worst_gap(law: Law, target: Conditional, count: int) -> float:
    """Largest difference to the target's chain rule over all sequences of `count` tokens."""
    got, expected = extend(law, target, count), extend({(): 1.0}, target, count)
    return max(abs(got.get(s, 0.0) - expected.get(s, 0.0)) for s in got.keys() | expected.keys())
