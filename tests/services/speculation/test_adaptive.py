from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.speculation.adaptive import Adaptive
from services.speculation.cost import CostModel
from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.expectation import AcceptanceModel, committed
from services.speculation.round import Choice, RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import DraftStrategy
from tests.services.speculation.rounds import OFF, SUFFIX, chain, outcome

CHAINS = tuple(chain(d) for d in (2, 3, 5))
NOISE = 0.04


def price(strategy: DraftStrategy, view: RoundView) -> StageSeconds:
    """A card: nodes are free until arithmetic binds, every draft pass costs a tenth of a decode step."""
    nodes = view.running * strategy.num_draft_tokens
    network = strategy.drafter == "eagle"
    extend = (1e-3 + 2e-6 * view.behind_tokens) if network else 0.0
    draft = 1e-3 * strategy.depth if network else 2e-4 * strategy.depth
    return StageSeconds(extend, draft, max(1e-2, 8e-5 * nodes), 1e-3)


@dataclass
class World:
    """Requests that never end. `rates`: acceptance by position of EAGLE drafts; the suffix index finds nothing good.
    `late`: the engine launches a round before it has read the last one, and tells of it afterwards. `held_up`: rounds
    by number that take so many times as long."""

    selector: Adaptive
    rates: Sequence[float] = (0.8,) * 8
    suffix: Sequence[float] = (0.0,) * 8
    price: Callable[[DraftStrategy, RoundView], StageSeconds] = price
    seed: int = 0
    behind: int = 0
    version: int = 0
    late: bool = False
    held_up: dict[int, float] = field(default_factory=dict)
    chosen: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.unread: list[RoundOutcome] = []

    def view(self, running: int) -> RoundView:
        return RoundView(running, 500 * running, min(self.behind, 500 * running), 1.0, self.version)

    def play(self, running: int, rounds: int) -> Counter[str]:
        before = len(self.chosen)
        for _ in range(rounds):
            view = self.view(running)
            choice = self.selector.choose(view)
            strategy, rates = choice.strategy, self.suffix if choice.strategy == SUFFIX else self.rates
            noise = math.exp(self.rng.gauss(0, NOISE)) * self.held_up.get(len(self.chosen), 1)
            stages = self.price(strategy, view)
            told = StageSeconds(*(noise * s for s in (stages.extend, stages.draft, stages.verify, stages.rest)))
            done = outcome(strategy, view, rates, told, self.rng)
            self.unread.append(done)
            if not self.late or len(self.unread) > 1:
                self.selector.record(self.unread.pop(0))
            self.behind = done.tokens if strategy.drafter == "eagle" else self.behind + done.tokens
            self.chosen.append(choice)
        return Counter(c.strategy.name for c in self.chosen[before:])

    def score(self, strategy: DraftStrategy, running: int) -> float:
        rates = self.suffix if strategy == SUFFIX else self.rates
        tokens = committed(list(rates[: strategy.depth]))
        return running * tokens / self.price(strategy, replace(self.view(running), behind_tokens=running)).total


def is_check(choice: Choice) -> bool:
    return choice.reason.startswith("checks")


def points(law: Callable[[DraftStrategy, RoundView], StageSeconds] = price) -> list[CostPoint]:
    views = [RoundView(n, n * c, n * b) for n in (1, 4, 16, 64) for c in (20, 500) for b in (2, 20)]
    return [CostPoint(s, v, law(s, v)) for s in (OFF, *CHAINS, SUFFIX) for v in views]


def world(calibrated: bool = True, **more) -> World:
    costs = CostModel(CostTable.fit(points())) if calibrated else CostModel()
    options = {k: more.pop(k) for k in ("check_share", "margin") if k in more}
    return World(Adaptive((*CHAINS, SUFFIX), costs, AcceptanceModel(), **options), **more)


def best(w: World, running: int) -> str:
    return max((OFF, *CHAINS, SUFFIX), key=lambda s: w.score(s, running)).name


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("running", [1, 8, 64])
def test_finds_what_pays(running: int, calibrated: bool) -> None:
    """Nearly all rounds bring within 5 % of the best strategy's tokens per second."""
    w = world(calibrated)
    w.play(running, 100)
    arms = {s.name: w.score(s, running) for s in (OFF, *CHAINS, SUFFIX)}
    chosen = w.play(running, 400)
    good = sum(n for name, n in chosen.items() if arms[name] >= 0.95 * max(arms.values()))
    assert good >= 0.93 * 400, (chosen, arms)


def test_the_choice_follows_the_batch_in_both_directions() -> None:
    w = world(rates=(0.4,) * 8)
    assert best(w, 64) == "off" and best(w, 1) != "off"
    for _ in range(3):
        assert w.play(64, 150)["off"] > 130
        assert w.play(1, 150)["off"] < 20


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    first=st.floats(0.05, 0.9),
    running=st.sampled_from([1, 4, 16, 64]),
    per_pass=st.floats(0.2, 2.0),
    seed=st.integers(0, 1000),
)
def test_a_dominated_strategy_is_not_played(first: float, running: int, per_pass: float, seed: int) -> None:
    """Accepted as often, at a quarter more time for everything: never better. It is checked now and then at most."""

    def law(strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        plain = price(chain(4) if strategy == SUFFIX else strategy, view)
        factor = 1.25 if strategy == SUFFIX else 1.0
        stages = (0.0, per_pass * (plain.draft + plain.extend), plain.verify, plain.rest)
        return StageSeconds(*(factor * s for s in stages))

    rates = tuple(first * 0.95**k for k in range(8))
    w = World(Adaptive((chain(4), SUFFIX), CostModel(), AcceptanceModel()), rates, rates, law, seed)
    w.play(running, 400)
    played = w.play(running, 500)
    assert played[SUFFIX.name] <= 50, (played, first, running, per_pass, seed)


@pytest.mark.parametrize("running", [4, 64])
def test_a_drafter_that_fails_is_left_and_one_that_became_good_is_taken_up(running: int) -> None:
    w = world(rates=(0.02,) * 8)
    chosen = w.play(running, 200)
    assert chosen["off"] > 165, "an untrained drafter"
    w.rates, w.version = (0.95,) * 8, 1
    assert w.play(running, 60)["off"] < 40, "the new version is found out within a few rounds"
    w.rates = (0.02,) * 8  # and one that nobody told of
    assert w.play(running, 120)["off"] > 60


def test_a_hopeless_strategy_is_not_checked() -> None:
    """Even a perfect chain of 5 could not pay for a draft pass of ten decode steps."""

    def law(strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        plain = price(strategy, view)
        return replace(plain, draft=100 * plain.draft) if strategy.drafter == "eagle" else plain

    selector = Adaptive(CHAINS, CostModel(CostTable.fit(points(law))), AcceptanceModel())
    w = World(selector, price=law)
    assert w.play(1, 1000) == Counter(off=1000)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_checks_cost_no_more_than_their_share(share: float, late: bool) -> None:
    w = world(rates=(0.3,) * 8, check_share=share, late=late)
    w.play(64, 50)
    spent = {s.name: price(s, w.view(64)).total for s in (OFF, *CHAINS, SUFFIX)}
    chosen, off = w.play(64, 2000), w.score(OFF, 64)
    lost = sum(n * spent[name] * (1 - w.score(s, 64) / off) for s in (*CHAINS, SUFFIX) if (n := chosen[name := s.name]))
    took = sum(n * spent[name] for name, n in chosen.items())
    assert lost <= (share + 0.005) * took


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("times", [10.0, 1000.0])
def test_a_round_that_something_held_up_does_not_end_the_checks(times: float, beside: int, late: bool) -> None:
    """Kernels that compile, another process on the GPU: what such a round took would be paid off by a hundredth of
    every later one, and until then nothing that had become better would be found."""
    w = world(rates=(0.02,) * 8, late=late)
    w.play(2, 300)
    check = next(n for n, choice in enumerate(w.chosen) if n > 100 and is_check(choice))
    w = world(rates=(0.02,) * 8, late=late, held_up={check + beside: times})
    w.play(2, check + 2)
    w.rates = (0.95,) * 8
    w.play(2, 1500)
    assert w.play(2, 100)["off"] < 10


def test_a_late_engine_is_told_of_checks_that_are_theirs() -> None:
    """The round that is recorded behind a check's choice is the one before it."""
    lost = [
        lost_to_off(world(False, rates=(0.4,) * 8, price=dear, seed=1, late=late), 8, 800) for late in (False, True)
    ]
    assert lost[1] == pytest.approx(lost[0], abs=0.01)


def test_the_reference_is_measured_again_where_it_was_left_long_ago() -> None:
    """Every gain that is told rests on OFF's figure: while only others run, the machine may have become another."""
    world = World(Adaptive(CHAINS, CostModel(), AcceptanceModel()))
    world.play(1, 1500)
    before, usual = world.chosen[-1].expected_off, world.price
    slow_off = StageSeconds(0.0, 0.0, 2e-2, 1e-3)  # it takes twice as long
    world.price = lambda s, v: slow_off if s.is_off else usual(s, v)
    assert 4 <= world.play(1, 1500)["off"] <= 15
    assert world.chosen[-1].expected_off < 0.8 * before


def test_no_flapping_on_a_plateau() -> None:
    """Two strategies that are worth the same: switches cost nothing here, but are not wanted either."""

    def law(strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        tokens = committed([0.8] * strategy.depth)
        return StageSeconds(0.0, 0.0, 1e-2 * tokens, 0.0)  # every chain as fast as OFF

    for seed in range(3):
        selector = Adaptive(CHAINS, CostModel(CostTable.fit(points(law))), AcceptanceModel())
        w = World(selector, price=law, seed=seed)
        w.play(16, 300)
        w.play(16, 1000)
        names = [c.strategy.name for c in w.chosen[300:] if not c.reason.startswith("checks")]
        switches = sum(a != b for a, b in itertools.pairwise(names))
        checks = sum(c.reason.startswith("checks") for c in w.chosen[300:])
        assert switches <= 40 and checks <= 250, (seed, switches, checks)


def test_the_same_rounds_lead_to_the_same_choices() -> None:
    def names(seed: int) -> list[str]:
        w = world(seed=seed)
        for running in (64, 20, 5, 1):
            w.play(running, 60)
        return [c.strategy.name for c in w.chosen]

    assert names(1) == names(1) != names(2)


# -- catching up


def far_behind(running: int, behind: int) -> RoundView:
    return RoundView(running, behind, behind)


def with_life(tokens: int) -> Adaptive:
    """Requests were seen to live that long; the drafter is known to be good."""
    w = world(rates=(0.7,) * 8)
    w.play(8, 60)
    w.selector._life._tokens, w.selector._life._ends = 64.0 * tokens, 64.0
    w.selector._held, w.selector._choice, w.selector._credit_s = OFF, None, 0.0
    return w.selector


def test_catching_up_is_entered_for_requests_that_live_and_not_for_those_about_to_end() -> None:
    view = far_behind(8, 100_000)  # 0.2 s, some fifteen rounds of OFF
    assert with_life(20).choose(view).strategy == OFF
    assert not with_life(4000).choose(view).strategy.is_off


def test_once_paid_it_is_not_paid_again() -> None:
    """Behind by much, ON is entered once; with nothing left to catch up with it goes on even for short lives."""
    selector = with_life(20)
    assert selector.choose(far_behind(8, 100_000)).strategy == OFF
    selector._choice = None
    assert not selector.choose(RoundView(8, 100_000, 20)).strategy.is_off


def test_the_price_of_catching_up_grows_with_what_is_behind() -> None:
    selector = with_life(300)
    eagle = [selector.outlooks(far_behind(8, n))[1].seconds for n in (1_000, 10_000, 100_000)]
    assert eagle == sorted(eagle) and len(set(eagle)) == 3
    off = {selector.outlooks(RoundView(8, 100_000, n))[0].seconds for n in (0, 100_000)}
    assert len(off) == 1


# -- what it says


def test_a_choice_says_what_it_expects() -> None:
    w = world(rates=(0.6,) * 8)
    for running in (64, 1):
        w.play(running, 200)
        last = w.chosen[-1]
        assert last.expected >= last.expected_off * 0.9
        assert last.expected_off == pytest.approx(w.score(OFF, running), rel=0.1)
    reasons = {c.reason for c in w.chosen}
    assert reasons <= {
        "most tokens per second expected", "kept: no other gains enough", "checks whether it pays",
        "drafts cost more than they bring",
    }  # fmt: skip
    assert len(reasons) >= 3


def test_without_a_drafter_only_what_needs_none() -> None:
    w = world(version=-1, suffix=(0.5,) * 8)
    assert set(w.play(4, 200)) <= {"off", SUFFIX.name}
    w.version = 0
    assert set(w.play(4, 200)) & {c.name for c in CHAINS}


def test_a_forced_strategy_that_is_not_its_own_does_not_disturb_it() -> None:
    w = world()
    for _ in range(5):
        view = w.view(4)
        w.selector.record(outcome(chain(7), view, w.rates, price(chain(7), view), w.rng))
    assert chain(7).name not in w.play(4, 100)


def test_calibration_replaces_what_it_began_with() -> None:
    w = world(calibrated=False)
    before = w.selector.outlooks(w.view(4))[0].seconds
    w.selector.calibrate(points())
    assert w.selector.outlooks(w.view(4))[0].seconds == pytest.approx(price(OFF, w.view(4)).total, rel=0.05) != before


@pytest.mark.parametrize("offered", [(OFF,), (OFF, CHAINS[0]), (OFF, CHAINS[2])], ids=lambda o: o[-1].name)
def test_nothing_is_chosen_or_checked_that_the_engine_does_not_offer(offered: tuple[DraftStrategy, ...]) -> None:
    """The best one by far is not to be had: the choice is among the others, and learning goes on."""
    selector = Adaptive(CHAINS, CostModel(), AcceptanceModel())
    rng, chosen = random.Random(3), Counter[str]()
    for _ in range(400):
        view = RoundView(4, 2000, offered=offered)
        strategy = selector.choose(view).strategy
        chosen[strategy.name] += 1
        selector.record(outcome(strategy, view, (0.9,) * strategy.depth, price(strategy, view).total, rng))
    assert chosen.keys() <= {s.name for s in offered}
    assert chosen[offered[-1].name] > 350, "what is offered and pays is found"


# -- never much below OFF


def lost_to_off(w: World, running: int, rounds: int) -> float:
    """The share of the time that OFF would not have needed for the tokens that are expected of the rounds."""
    lost = took = 0.0
    for _ in range(rounds):
        view = w.view(running)
        w.play(running, 1)
        strategy = w.chosen[-1].strategy
        rates = w.suffix if strategy == SUFFIX else w.rates
        seconds = w.price(strategy, view).total
        took += seconds
        lost += seconds - committed(list(rates[: strategy.depth])) * w.price(OFF, view).total
    return lost / took


def dear(strategy: DraftStrategy, view: RoundView) -> StageSeconds:
    """A CPU: every node has its price, and what the drafter has not seen is dear to catch up with."""
    network = strategy.drafter == "eagle"
    nodes = view.running * strategy.num_draft_tokens
    draft = (3e-4 + 5e-5 * view.running) * strategy.depth if network else 1e-5 * view.running * strategy.depth
    return StageSeconds(1e-3 + 1e-5 * view.behind_tokens if network else 0.0, draft, 4e-3 + 2e-4 * nodes, 1e-3)


def test_new_drafters_that_do_not_pay_cost_little() -> None:
    """A run that trains its drafter serves another version every step. Of each the best is hoped, so that a check loses
    more than was expected of it: what it did lose is what the next ones must be paid from."""
    shares = []
    for seed in range(3):
        costs = CostModel(CostTable.fit(points(dear)))
        w = World(Adaptive(CHAINS, costs, AcceptanceModel()), (0.4,) * 8, price=dear, seed=seed)
        lost_to_off(w, 8, 100)
        for version in range(1, 25):
            w.version = version
            shares.append(lost_to_off(w, 8, 50))
    assert sum(shares) / len(shares) <= 0.032, shares


def test_off_is_run_where_it_never_was() -> None:
    """Its price there may be far from what other batch sizes say, and while drafts are used nothing else would tell."""
    w = world(rates=(0.7,) * 8)
    w.play(64, 100)
    for running in (8, 2):
        assert best(w, running) != "off"
        assert 1 <= w.play(running, 40)["off"] <= 3


def test_drafts_are_not_credited_with_what_stops_cut_off() -> None:
    """Short responses: of a chain of 5 that is accepted whole, the end among the next eight tokens leaves 4.1 of 6."""
    selector, view = Adaptive(CHAINS, CostModel(), AcceptanceModel()), RoundView(16, 1600)
    s, took = chain(5), StageSeconds(1e-3, 1e-3, 1e-2, 1e-3)
    rng = random.Random(0)
    for _ in range(50):
        kept = sum(min(6, rng.randrange(1, 9)) for _ in range(16))
        selector.record(RoundOutcome(s, view, kept, took, (16,) * 5, (16,) * 5, 6 * 16 - kept))
    promised = next(o for o in selector.outlooks(view) if o.strategy == s).tokens
    assert promised == pytest.approx(4.1, rel=0.15) and selector.acceptance.tokens(s, view) > 5.5
