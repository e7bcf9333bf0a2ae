from __future__ import annotations

import itertools
import math
import random

import pytest

from services.core.errors import DataError
from services.speculation.cost import CostModel, batch_bucket
from services.speculation.cost_table import CostPoint, CostTable, quantities
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import DraftStrategy
from tests.services.speculation.rounds import OFF, SUFFIX, TREE, WIDE, chain

ARMS = (OFF, chain(2), chain(5), TREE, WIDE, SUFFIX)
GRID = list(itertools.product((1, 4, 16, 64), (20, 500)))


def gpu(strategy: DraftStrategy, view: RoundView) -> StageSeconds:
    """A card's law: the pass over the nodes is bound by the weights or by arithmetic, contexts are read once; a draft
    pass has a price of its own. No table has this shape."""
    nodes, context = view.running * strategy.num_draft_tokens, view.context_tokens
    verify = max(6e-3, 2.5e-5 * nodes) + 5e-8 * context
    network, look_up = strategy.drafter == "eagle", strategy.drafter == "suffix"
    extend = (4e-4 + 1.5e-6 * view.behind_tokens) if network else 0.0
    draft = strategy.depth * (6e-4 + 1e-8 * context) if network else 2e-4 * look_up
    return StageSeconds(extend, draft, verify, 3e-4 + 1e-6 * nodes)


def cpu(strategy: DraftStrategy, view: RoundView) -> StageSeconds:
    nodes, context = view.running * strategy.num_draft_tokens, view.context_tokens
    network = strategy.drafter == "eagle"
    verify = 4e-3 + 1e-4 * nodes + 2e-7 * context * strategy.num_draft_tokens
    draft = strategy.depth * (5e-4 + 2e-5 * view.running) if network else 1e-5 * strategy.depth * view.running
    return StageSeconds(1e-3 + 2e-5 * view.behind_tokens if network else 0.0, draft, verify, 1e-4 + 1e-5 * view.running)


def view_of(running: int, context: int, behind: int | None = None) -> RoundView:
    return RoundView(running, running * context, 2 * running if behind is None else running * behind)


def points(law=gpu, noise: float = 0.0, apart: bool = True, seed: int = 0) -> list[CostPoint]:
    rng, found = random.Random(seed), []
    for strategy, (running, context) in itertools.product(ARMS, GRID):
        for behind in (2, context):
            true = law(strategy, view_of(running, context, behind))
            told = [s * (1 + rng.uniform(-noise, noise)) for s in (true.extend, true.draft, true.verify, true.rest)]
            seconds = StageSeconds(*told) if apart else sum(told)
            found.append(CostPoint(strategy, view_of(running, context, behind), seconds))
    return found


# -- the table


@pytest.mark.parametrize("law", [gpu, cpu])
@pytest.mark.parametrize("apart", [True, False], ids=["stages", "sums"])
def test_a_fit_meets_its_points_and_what_lies_between(law, apart: bool) -> None:
    table = CostTable.fit(points(law, apart=apart))
    assert table.spread < 0.05
    for strategy, running, context in itertools.product(ARMS, (1, 3, 8, 24, 48, 64), (50, 300)):
        true, found = law(strategy, view_of(running, context)), table.seconds(strategy, view_of(running, context))
        assert found.total == pytest.approx(true.total, rel=0.2), (strategy.name, running, context)
        if apart:
            assert found.draft == pytest.approx(true.draft, abs=0.1 * true.total)
            assert found.verify == pytest.approx(true.verify, abs=0.2 * true.total)


def test_noise_is_averaged_out() -> None:
    table = CostTable.fit(points(noise=0.2))
    errors = [table.seconds(s, view_of(*g)).total / gpu(s, view_of(*g)).total - 1 for s in ARMS for g in GRID]
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.1
    assert 0.03 < table.spread < 0.2


def test_costs_only_grow() -> None:
    """With requests, contexts, nodes and what is behind: whatever was measured."""
    for seed in range(5):
        table = CostTable.fit(points(noise=0.3, seed=seed))
        for strategy in ARMS:
            by_size = [table.seconds(strategy, RoundView(n, 1000, 500)).total for n in (1, 2, 7, 30, 64, 200)]
            by_context = [table.seconds(strategy, RoundView(4, n, 10)).total for n in (10, 100, 1000, 10**5)]
            by_behind = [table.seconds(strategy, RoundView(4, 10**4, n)).total for n in (0, 10, 1000, 10**4)]
            assert all(a <= b for line in (by_size, by_context, by_behind) for a, b in itertools.pairwise(line))


def test_off_neither_drafts_nor_extends_and_a_look_up_runs_no_network() -> None:
    table, view = CostTable.fit(points()), view_of(16, 500)
    off, suffix = table.seconds(OFF, view), table.seconds(SUFFIX, view)
    assert off.extend == off.draft == suffix.extend == 0 and suffix.draft > 0


def test_a_line_is_the_sum_of_its_terms() -> None:
    table = CostTable.fit(points())
    for strategy, view in itertools.product(ARMS, (view_of(3, 70), view_of(64, 500, 400))):
        needed = quantities(strategy, view.running, view.context_tokens, view.behind_tokens, table.knots)
        total = sum(table.terms.get(name, 0.0) * amount for name, amount in needed.items())
        assert table.seconds(strategy, view).total == pytest.approx(total)


def test_json_and_back() -> None:
    table = CostTable.fit(points(noise=0.1))
    assert CostTable.from_json(table.to_json()) == table
    assert CostModel.from_json(CostModel(table).to_json()).table == table


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "terms": 3}'])
def test_what_is_no_table_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(DataError, match="longtail bench costs"):
        CostTable.from_json(text)


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(DataError, match="let the engine calibrate"):
        CostTable.fit([])


# -- the correction


def told(model: CostModel, strategy: DraftStrategy, view: RoundView, seconds: StageSeconds) -> None:
    model.observe(RoundOutcome(strategy, view, view.running, seconds))


def scaled(stages: StageSeconds, factor: float) -> StageSeconds:
    return StageSeconds(*(factor * s for s in (stages.extend, stages.draft, stages.verify, stages.rest)))


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.7])
def test_rounds_correct_a_wrong_table(factor: float) -> None:
    """The prediction comes within 3 % of what one strategy really takes, outliers among the rounds or not."""
    rng, model, view = random.Random(0), CostModel.fit(points()), view_of(16, 500)
    for n in range(80):
        noise = math.exp(rng.gauss(0, 0.04)) * (4.0 if n % 20 == 3 else 1.0)
        told(model, TREE, view, scaled(gpu(TREE, view), factor * noise))
    assert model.seconds(TREE, view).total == pytest.approx(factor * gpu(TREE, view).total, rel=0.03)


def test_a_strategys_error_is_taken_along_to_other_batch_sizes_and_less_to_other_strategies() -> None:
    model, plain = CostModel.fit(points()), CostModel.fit(points())
    for _ in range(20):
        told(model, chain(2), view_of(64, 500), scaled(plain.seconds(chain(2), view_of(64, 500)), 1.3))
    for strategy, low, high in ((chain(2), 1.25, 1.35), (chain(5), 1.05, 1.2)):
        ratio = model.seconds(strategy, view_of(16, 500)).verify / plain.seconds(strategy, view_of(16, 500)).verify
        assert low < ratio < high


def test_without_a_table_the_scale_is_learned_from_any_strategy() -> None:
    model, view, typical = CostModel(), view_of(8, 500), CostTable.typical()
    for _ in range(30):
        told(model, OFF, view, scaled(typical.seconds(OFF, view), 0.1))
    ratio = model.seconds(OFF, view).total / typical.seconds(OFF, view).total
    assert ratio == pytest.approx(0.1, rel=0.1)
    assert model.seconds(chain(5), view).total == pytest.approx(ratio * typical.seconds(chain(5), view).total, rel=0.1)


def test_catching_up_is_no_fault_of_the_strategy() -> None:
    """A first round behind a long stretch of OFF: the price per token is corrected, the round as such is not."""
    model, plain = CostModel.fit(points()), CostModel.fit(points())
    far = view_of(16, 500, 500)
    for _ in range(10):
        true = gpu(chain(3), far)
        told(model, chain(3), far, StageSeconds(2 * true.extend, true.draft, true.verify, true.rest))
    near = view_of(16, 500)
    assert model.seconds(chain(3), near).verify == pytest.approx(plain.seconds(chain(3), near).verify, rel=0.05)
    assert model.seconds(chain(3), far).extend == pytest.approx(2 * gpu(chain(3), far).extend, rel=0.15)


def test_catching_up_is_what_extending_costs_more() -> None:
    model = CostModel.fit(points())
    for n in range(20):
        view = view_of(16, 500, 20 * n)
        told(model, chain(3), view, scaled(gpu(chain(3), view), 1.4))
    near, far = view_of(16, 500, 2), view_of(16, 500, 300)
    more = model.seconds(chain(3), far).total - model.seconds(chain(3), near).total
    assert model.catching_up(chain(3), 16, 16 * 298) == pytest.approx(more) and more > 0
    assert model.catching_up(SUFFIX, 16, 1000) == 0


def test_stages_that_were_not_timed_apart_correct_the_sum() -> None:
    model, view = CostModel.fit(points()), view_of(16, 500)
    for _ in range(30):
        told(model, chain(3), view, StageSeconds(0.0, 0.0, 1.2 * gpu(chain(3), view).total, 0.0))
    assert model.seconds(chain(3), view).total == pytest.approx(1.2 * gpu(chain(3), view).total, rel=0.05)


def test_the_spread_shrinks_where_rounds_were_seen() -> None:
    model, view = CostModel.fit(points()), view_of(16, 500)
    before = model.spread(TREE, view)
    for _ in range(20):
        told(model, TREE, view, gpu(TREE, view))
    assert model.spread(TREE, view) < 0.03 < model.spread(TREE, view_of(64, 500)) < before
    assert model.spread(OFF, view) == before
    assert CostModel().spread(OFF, view) > 2 * before, "a table that nobody measured is believed less"


def test_a_clock_too_coarse_teaches_nothing() -> None:
    model, view = CostModel.fit(points()), view_of(1, 20)
    before = model.seconds(OFF, view)
    told(model, OFF, view, StageSeconds(0.0, 0.0, 0.0, 0.0))
    assert model.seconds(OFF, view) == before


def test_buckets_are_half_octaves() -> None:
    starts = [n for n in range(1, 130) if n == 1 or batch_bucket(n) != batch_bucket(n - 1)]
    assert starts[:4] == [1, 2, 3, 4] and len(starts) == 14
