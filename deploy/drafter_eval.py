"""`longtail drafter eval`: drafters beside each other on one target's held-out prompts.

Acceptance is counted where the native engine can draft (EAGLE, suffix index), and estimated from the target's own
responses where it cannot (EAGLE-3) or where drafters of two methods are to be compared by one yardstick. The speed-up
per batch size is what the costs of rounds say at these acceptances: the best depth of a chain against no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from deploy.drafter_judge import Judge, Requests
from services.config.speculation import StrategyConfig, eagle_chain
from services.core.errors import DataError
from services.core.types import Rollout
from services.drafter.evaluate import chain_reach_of
from services.models.drafter import DrafterMethod
from services.models.hidden import HiddenStates
from services.speculation.cost_table import CostTable
from services.speculation.expectation import committed
from services.speculation.round import RoundOutcome, RoundView
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

SUFFIX = draft_strategy(StrategyConfig(drafter="suffix", depth=8, num_draft_tokens=9))
TEMPERATURES = (0.0, 0.6, 1.0)
BATCHES = (1, 8, 32)
How = Literal["engine", "offline"]


@dataclass(frozen=True)
class Contender:
    """A drafter under a name; without a method: the suffix index."""

    name: str
    method: DrafterMethod | None = None
    tensors: Mapping[str, Tensor] | None = None

    @property
    def kind(self) -> str:
        return "suffix" if self.method is None else self.method.name


@dataclass(frozen=True, slots=True)
class Reached:
    """`rates`: by position, of drafts whose predecessors were accepted; `reach`: of all rounds with a draft, those in
    which it was accepted up to the position. `acceptance_length`: over rounds with a draft; `tokens_per_round`: over
    all, also those for which a look-up found nothing."""

    drafter: str
    kind: str
    temperature: float
    how: How
    rates: tuple[float, ...]
    reach: tuple[float, ...]
    tokens_per_round: float

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(self.reach)


@dataclass(frozen=True, slots=True)
class Speed:
    """`speedup`: expected tokens per second over those without drafts; `depth` 0: no drafts are better."""

    drafter: str
    temperature: float
    running: int
    depth: int
    speedup: float


@dataclass(frozen=True)
class Costs:
    """A table and where it is from; `context`: tokens of a request halfway through its response."""

    table: CostTable
    source: str
    context: float


@dataclass(frozen=True)
class Evaluation:
    prompts: int
    responses: int
    reached: tuple[Reached, ...]
    speeds: tuple[Speed, ...]
    costs: str


def evaluate(
    judge: Judge,
    contenders: Sequence[Contender],
    requests: Requests,
    temperatures: Sequence[float],
    depth: int,
    offline: bool,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Reached], list[Rollout]]:
    """Every contender at every temperature; also the target's own responses, without drafts. `offline`: estimate every
    trained drafter, also where the engine could count."""
    found: list[Reached] = []
    plain: list[Rollout] = []
    for temperature in temperatures:
        asked = requests.at(temperature)
        rollouts, _ = judge.generate(OFF, asked, temperature)
        if not any(len(r.response_ids) > 2 for r in rollouts):
            raise DataError("the target's responses are empty: nothing to draft; check the prompts and --max-tokens")
        plain += rollouts
        states: dict[tuple[int, ...], list[HiddenStates]] = {}
        for one in contenders:
            say(f"temperature {temperature:g}: {one.name}")
            if one.method is None or (one.kind == "eagle" and not offline):
                found.append(_counted(judge, one, asked, temperature, depth))
                continue
            layers = one.method.aux_layers
            if layers not in states:
                states[layers] = judge.states(rollouts, layers)
            found.append(_estimated(judge, one, states[layers], temperature, depth))
    return found, plain


def _counted(judge: Judge, one: Contender, requests: Requests, temperature: float, depth: int) -> Reached:
    strategy = SUFFIX if one.method is None else draft_strategy(eagle_chain(depth))
    _, outcomes = judge.generate(strategy, requests, temperature, one.tensors)
    return counted(one, outcomes, temperature)


def counted(one: Contender, outcomes: Sequence[RoundOutcome], temperature: float) -> Reached:
    """From an engine's rounds."""
    depth = max((len(o.tried) for o in outcomes), default=0)
    tried = [sum(o.tried[k] for o in outcomes if len(o.tried) > k) for k in range(depth)]
    accepted = [sum(o.accepted[k] for o in outcomes if len(o.accepted) > k) for k in range(depth)]
    rows = sum(o.view.running for o in outcomes)
    return Reached(
        one.name,
        one.kind,
        temperature,
        "engine",
        tuple(a / t for a, t in zip(accepted, tried, strict=True) if t),
        tuple(a / tried[0] for a, t in zip(accepted, tried, strict=True) if t),
        1 + sum(accepted) / rows if rows else 1.0,
    )


def _estimated(judge: Judge, one: Contender, states: Sequence[HiddenStates], temperature: float, depth: int) -> Reached:
    assert one.method is not None and one.tensors is not None
    reach = chain_reach_of(one.method, one.tensors, judge.head, states, depth, temperature)
    length = reach.acceptance_length
    return Reached(one.name, one.kind, temperature, "offline", reach.rates, reach.reach, length)


def speeds_of(reached: Sequence[Reached], batches: Sequence[int], costs: Costs) -> list[Speed]:
    """What each contender is expected to bring at each batch size."""
    return [speed_of(one, running, costs) for one in reached for running in batches]


def speed_of(one: Reached, running: int, costs: Costs) -> Speed:
    off = seconds_of(OFF, running, 1.0, costs)
    best = (1.0, 0)
    if one.kind == "suffix":
        tokens = one.tokens_per_round
        best = max(best, (tokens * off / seconds_of(SUFFIX, running, tokens, costs), SUFFIX.depth))
    else:
        for depth in range(1, len(one.rates) + 1):
            tokens = committed(list(one.rates[:depth]))
            chain = draft_strategy(eagle_chain(depth))
            best = max(best, (tokens * off / seconds_of(chain, running, tokens, costs), depth))
    return Speed(one.drafter, one.temperature, running, best[1], best[0])


def seconds_of(strategy: DraftStrategy, running: int, tokens: float, costs: Costs) -> float:
    """Of a round in which the drafter is one round of `tokens` behind."""
    context = max(1, round(running * costs.context))
    behind = 0 if strategy.is_off else min(context, round(running * tokens))
    return costs.table.seconds(strategy, RoundView(running, context, behind)).total


def mean_context(rollouts: Sequence[Rollout]) -> float:
    return sum(len(r.prompt_ids) + len(r.response_ids) / 2 for r in rollouts) / len(rollouts)
