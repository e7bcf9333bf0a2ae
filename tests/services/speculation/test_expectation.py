from __future__ import annotations

import itertools
import random

import pytest

from services.speculation.acceptance_track import Track
from services.speculation.expectation import AcceptanceModel, committed, tree_rates
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import DraftStrategy
from services.speculation.tree import TreeShape, tree_shape
from tests.services.speculation.rounds import OFF, SUFFIX, TREE, WIDE, chain, outcome

VIEW = RoundView(16, 1600)
FALLING = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


def feed(model: AcceptanceModel, strategy: DraftStrategy, rates, rounds: int, view: RoundView = VIEW, seed: int = 0):
    rng = random.Random(seed)
    for _ in range(rounds):
        model.observe(outcome(strategy, view, rates, 0.01, rng))


def test_off_is_one_token_for_certain() -> None:
    model = AcceptanceModel()
    assert all(model.tokens_at(OFF, VIEW, d) == 1.0 for d in (-1, 0, 1))
    model.observe(RoundOutcome(OFF, VIEW, 16, StageSeconds(0, 0, 1, 0)))
    assert model.tokens(OFF, VIEW) == 1.0


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_chain_learns_its_acceptance_length(depth: int) -> None:
    model = AcceptanceModel()
    feed(model, chain(depth), FALLING, 100)
    assert model.tokens(chain(depth), VIEW) == pytest.approx(committed(list(FALLING[:depth])), rel=0.05)


def test_a_chain_of_3_tells_about_a_chain_of_2_and_of_5() -> None:
    model = AcceptanceModel()
    feed(model, chain(3), (0.9, 0.9, 0.9), 100)
    assert model.tokens(chain(2), VIEW) == pytest.approx(1 + 0.9 + 0.81, rel=0.03)
    assert model.tokens(chain(3), VIEW) < model.tokens(chain(5), VIEW) < committed([0.9] * 5)
    low, high = (model.tokens_at(chain(5), VIEW, d) for d in (-1, 1))
    assert high - low > 2 * (model.tokens_at(chain(3), VIEW, 1) - model.tokens_at(chain(3), VIEW, -1))


def test_what_is_unknown_is_plausibly_worth_a_try_and_what_failed_is_not() -> None:
    model = AcceptanceModel()
    assert model.tokens_at(chain(3), VIEW, 1) > 2.5
    feed(model, chain(2), (0.02, 0.0), 5)
    for strategy in (chain(3), chain(5), TREE):
        assert model.tokens_at(strategy, VIEW, 1) < 1.3, strategy.name


@pytest.mark.parametrize("shape", [tree_shape(3, 2, 6), tree_shape(4, 4, 16), tree_shape(2, 3, 7), tree_shape(3, 1, 4)])
def test_tree_rates_by_enumeration(shape: TreeShape) -> None:
    """Every outcome of every node, weighted."""
    rates, decay = (0.7, 0.5, 0.6, 0.4), 0.45
    reached, advanced, first, offered = ([0.0] * shape.depth for _ in range(4))
    nodes = [n for n in range(shape.num_nodes) if n]
    for luck in itertools.product((False, True), repeat=len(nodes)):
        weight, accepts = 1.0, dict(zip(nodes, luck, strict=True))
        for n in nodes:
            rank = shape.children[shape.parents[n]].index(n)
            p = rates[shape.depths[n] - 1] * decay**rank
            weight *= p if accepts[n] else 1 - p
        at = 0
        for k in range(shape.depth):
            reached[k] += weight
            children = shape.children[at]
            offered[k] += weight * bool(children)
            chosen = next((c for c in children if accepts[c]), None)
            if chosen is None:
                break
            advanced[k] += weight
            first[k] += weight * (chosen == children[0])
            at = chosen
    found = tree_rates(shape, rates, decay)
    for k in range(shape.depth):
        assert found.advance[k] == pytest.approx(advanced[k] / reached[k])
        assert found.first[k] == pytest.approx(first[k] / advanced[k])
        assert found.offered[k] == pytest.approx(offered[k] / reached[k])


def test_a_chain_tells_about_a_tree_which_beats_it() -> None:
    model = AcceptanceModel()
    feed(model, chain(3), (0.7, 0.7, 0.7), 60)
    assert model.tokens(chain(2), VIEW) < model.tokens(TREE, VIEW) < model.tokens_at(TREE, VIEW, 1) < 4.0


def test_a_tree_learns_its_own_acceptance_and_tells_about_the_chain() -> None:
    model = AcceptanceModel()
    feed(model, TREE, (0.9, 0.85, 0.8), 60)
    assert model.tokens(TREE, VIEW) == pytest.approx(committed([0.9, 0.85, 0.8]), rel=0.05)
    assert model.tokens(chain(2), VIEW) > 2.1, "it was told nothing of its own"
    poor = AcceptanceModel()
    feed(poor, TREE, (0.1, 0.1, 0.0), 60)
    assert poor.tokens(chain(2), VIEW) < 1.25


def test_sampled_and_argmax_and_suffix_drafts_are_apart() -> None:
    model = AcceptanceModel()
    fresh = [model.tokens(s, VIEW) for s in (chain(3, sampled=False), SUFFIX)]
    feed(model, chain(3), (0.1, 0.1, 0.1), 50)
    assert [model.tokens(s, VIEW) for s in (chain(3, sampled=False), SUFFIX)] == fresh
    assert model.shares(chain(2), chain(5)) and not model.shares(chain(2), chain(2, sampled=False))
    assert not model.shares(chain(3), TREE) and not model.shares(TREE, WIDE)


def test_temperatures_are_apart_but_a_new_one_begins_with_a_guess() -> None:
    model, greedy = AcceptanceModel(), RoundView(16, 1600, temperature=0.0)
    feed(model, chain(3), (0.1, 0.1, 0.1), 50)
    guess = model.tokens(chain(3), greedy)
    feed(model, chain(3), (0.95, 0.95, 0.95), 50, greedy)
    assert 1.2 < guess < 1.8
    assert model.tokens(chain(3), VIEW) < 1.2 and model.tokens(chain(3), greedy) > 3.5


def test_a_suffix_that_rarely_has_a_draft_counts_as_not_accepted() -> None:
    model = AcceptanceModel()
    for _ in range(60):
        model.observe(RoundOutcome(SUFFIX, VIEW, 16 + 8, StageSeconds(0, 0, 1, 0), (4, 4), (4, 4)))
    assert model.tokens(SUFFIX, VIEW) == pytest.approx(1.5, rel=0.05)
    none = AcceptanceModel()
    for _ in range(60):
        none.observe(RoundOutcome(SUFFIX, VIEW, 16, StageSeconds(0, 0, 1, 0)))
    assert none.tokens(SUFFIX, VIEW) == pytest.approx(1.0, abs=0.05)


def test_another_drafter_is_uncertain_but_not_unknown() -> None:
    model = AcceptanceModel()
    feed(model, chain(3), (0.2, 0.2, 0.2), 100)
    feed(model, SUFFIX, (0.2, 0.2, 0.2), 100)
    before = [model.tokens(s, VIEW) for s in (chain(3), SUFFIX)]
    width = model.tokens_at(chain(3), VIEW, 1) - model.tokens_at(chain(3), VIEW, -1)
    model.drafter_changed()
    assert model.tokens(SUFFIX, VIEW) == before[1], "no network in it"
    assert before[0] < model.tokens(chain(3), VIEW) < AcceptanceModel().tokens(chain(3), VIEW)
    assert model.tokens_at(chain(3), VIEW, 1) - model.tokens_at(chain(3), VIEW, -1) > 3 * width


@pytest.mark.parametrize("running", [1, 16, 64])
@pytest.mark.parametrize(("was", "becomes"), [(0.8, 0.4), (0.3, 0.8)])
def test_a_jump_is_followed_within_rounds(running: int, was: float, becomes: float) -> None:
    model, view = AcceptanceModel(), RoundView(running, 100 * running)
    feed(model, chain(2), (was, was), 600, view)
    feed(model, chain(2), (becomes, becomes), 200 // running + 10, view, seed=1)
    assert model.tokens(chain(2), view) == pytest.approx(1 + becomes + becomes**2, abs=0.35)


def test_chance_alone_is_no_jump() -> None:
    """The memory is as long as its window says, however long nothing changes."""
    for seed in range(10):
        track, rng = Track(), random.Random(seed)
        for now in range(1000):
            hits = sum(rng.random() < 0.7 for _ in range(16))
            track.observe((hits,), (16,), now)
        assert track.tries > 300, seed


def test_what_was_not_seen_for_long_is_uncertain_again() -> None:
    model = AcceptanceModel()
    feed(model, chain(2), (0.5, 0.5), 100)
    sure = model.tokens_at(chain(2), VIEW, 1)
    for _ in range(3000):
        model.observe(RoundOutcome(OFF, VIEW, 16, StageSeconds(0, 0, 1, 0)))
    assert model.tokens_at(chain(2), VIEW, 1) > sure + 0.15
    assert model.tokens(chain(2), VIEW) == pytest.approx(1.75, abs=0.2)
