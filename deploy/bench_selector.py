"""`longtail bench selector`: how fast each selector generates, on recorded costs and made-up acceptance. No GPU.

Every selector runs the same requests through the same replayed engine (`deploy/replay.py`), one world per cost table
and trace. The oracle is told the true prices, acceptance and remaining lengths. Ours gets a calibration whose points
are off by up to 20 % each, taken at one short context only, and the rounds; the others get the rounds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from deploy.provenance import provenance
from deploy.replay import Prices, Recorded, Replay, Round, read_costs
from deploy.replay_traces import TRACES
from services.config.speculation import Bucket, BucketSelector, EmaSelector, StrategyConfig, eagle_chain
from services.speculation.adaptive import Adaptive
from services.speculation.beg import BucketedEpsilonGreedy
from services.speculation.cost import CostModel
from services.speculation.cost_table import CostPoint
from services.speculation.ema import Ema
from services.speculation.expectation import AcceptanceModel
from services.speculation.round import Choice, RoundOutcome, RoundView, StageSeconds
from services.speculation.selector import Fixed, Selector
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

TABLES = ("h100-7b", "h100-270m", "cpu-pocket")
ARMS = (
    StrategyConfig(),
    *(eagle_chain(d) for d in (2, 3, 4, 5)),
    StrategyConfig(drafter="eagle", depth=3, topk=2, num_draft_tokens=6),
    StrategyConfig(drafter="eagle", depth=8, topk=4, num_draft_tokens=16),
    StrategyConfig(drafter="suffix", depth=4, num_draft_tokens=5),
)
STRATEGIES = tuple(draft_strategy(a) for a in ARMS)
ORACLE, OURS = "oracle", "ours"
CALIBRATED_SIZES, CALIBRATED_CONTEXT, CALIBRATION_ERROR = (1, 4, 16, 64), 64, 0.2
BATCHES = (1, 2, 3, 5, 9, 17, 33, 65)  # where batch-size buckets begin
TARGETS = {"regret": 0.05, "worst_vs_off": 0.98}


class Oracle:
    """The best strategy of each round by the truth. Catching up is spread over the rounds that the requests do last."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def choose(self, view: RoundView) -> Choice:
        return Choice(max(STRATEGIES, key=lambda s: self._score(s, view)), "known to be the best")

    def record(self, outcome: RoundOutcome) -> None:
        """Knows already."""

    def _score(self, strategy: DraftStrategy, view: RoundView) -> float:
        tokens = self._replay.expected_tokens(strategy)
        usual = replace(view, behind_tokens=min(view.context_tokens, round(view.running * tokens)))
        steady = self._replay.expected_seconds(strategy, usual)
        catching_up = max(0.0, self._replay.expected_seconds(strategy, view).extend - steady.extend)
        seconds = steady.total + catching_up / max(1.0, self._replay.remaining_tokens() / tokens)
        return view.running * tokens / seconds


@dataclass(frozen=True)
class Cell:
    """One selector in one world, all seeds."""

    world: str
    selector: str
    tokens_per_s: tuple[float, ...]  # by seed
    vs_off: dict[int, float]  # by the start of the batch bucket, seeds pooled


def run_bench(
    repeats: int = 5, seed: int = 0, tables: Sequence[str] = TABLES, say: Callable[[str], None] = print
) -> dict[str, Any]:
    cells: list[Cell] = []
    for table in tables:
        recorded = read_costs(table)
        for trace in TRACES:
            found = [_cell(recorded, trace, name, range(seed, seed + repeats)) for name in selector_names()]
            say(_table(found))
            cells += found
    return {"bench": "selector", **provenance(), "repeats": repeats, "seed": seed, **_verdict(cells)}


def selector_names() -> tuple[str, ...]:
    return (ORACLE, OURS, "beg_mab", "beg_mab_32", "ema", *(s.name for s in STRATEGIES))


def _cell(recorded: Recorded, trace: str, name: str, seeds: Iterable[int]) -> Cell:
    rates, rounds = [], list[Round]()
    for seed in seeds:
        done = play(recorded, trace, name, seed)
        rates.append(tokens_per_s(done))
        rounds += done
    return Cell(f"{recorded.name}/{trace}", name, tuple(rates), _vs_off(rounds))


def play(recorded: Recorded, trace: str, name: str, seed: int) -> list[Round]:
    """One selector through one trace. The requests, their luck and the prices are the same for all selectors."""
    prices = Prices(recorded.table, seed)
    replay = Replay(prices, TRACES[trace](random.Random(seed)), OFF, seed)
    selector = _selector(name, replay, prices, seed)
    replay.run(lambda view: selector.choose(view).strategy, selector.record)
    return replay.rounds


def _selector(name: str, replay: Replay, prices: Prices, seed: int) -> Selector:
    rng = random.Random(f"{seed}/{name}")
    match name:
        case "oracle":
            return Oracle(replay)
        case "ours":
            return Adaptive(STRATEGIES, CostModel.fit(calibration(prices, rng)), AcceptanceModel())
        case "beg_mab":
            return BucketedEpsilonGreedy(BucketSelector(buckets=(Bucket(strategies=ARMS),)), rng)
        case "beg_mab_32":  # the reference's switch: off above 32 requests, its arms without OFF below
            off = Bucket(min_running=33, strategies=ARMS[:1])
            return BucketedEpsilonGreedy(BucketSelector(buckets=(Bucket(strategies=ARMS[1:]), off)), rng)
        case "ema":
            return Ema(EmaSelector())
    return Fixed(next(s for s in STRATEGIES if s.name == name))


def calibration(prices: Prices, rng: random.Random) -> list[CostPoint]:
    """Points as a hurried calibration might give them."""
    points = []
    for strategy in STRATEGIES:
        for running in CALIBRATED_SIZES:
            context = running * CALIBRATED_CONTEXT
            for behind in (running, context):
                view = RoundView(running, context, behind)
                true = prices.seconds(strategy, view)
                stages = (true.extend, true.draft, true.verify, true.rest)
                seen = [s * (1 + rng.uniform(-CALIBRATION_ERROR, CALIBRATION_ERROR)) for s in stages]
                points.append(CostPoint(strategy, view, StageSeconds(*seen)))
    return points


def tokens_per_s(rounds: Iterable[Round]) -> float:
    """All tokens through the time that they take at the expected pace of each batch size: were rounds simply summed up,
    luck with the drafts of the last few requests would decide, by some per cent."""
    tokens, expected, seconds = (defaultdict[int, float](float) for _ in range(3))
    for r in rounds:
        tokens[r.running] += r.tokens
        expected[r.running] += r.expected
        seconds[r.running] += r.seconds
    return sum(tokens.values()) / sum(tokens[n] * seconds[n] / expected[n] for n in tokens)


def _vs_off(rounds: Iterable[Round]) -> dict[int, float]:
    """Expected tokens, by those that OFF would have brought in the same time at the same batches and contexts."""
    tokens, off_tokens = defaultdict[int, float](float), defaultdict[int, float](float)
    for r in rounds:
        start = max(b for b in BATCHES if b <= r.running)
        tokens[start] += r.expected
        off_tokens[start] += r.seconds * r.running / r.off_seconds
    return {start: tokens[start] / off_tokens[start] for start in sorted(tokens)}


def _verdict(cells: Sequence[Cell]) -> dict[str, Any]:
    by: dict[str, dict[str, Cell]] = defaultdict(dict)
    for cell in cells:
        by[cell.world][cell.selector] = cell
    regrets = {
        world: [1 - o / b for o, b in zip(found[OURS].tokens_per_s, found[ORACLE].tokens_per_s, strict=True)]
        for world, found in by.items()
    }
    vs_off = {world: found[OURS].vs_off for world, found in by.items()}
    return {
        "throughput": {
            world: {name: round(median(c.tokens_per_s), 1) for name, c in found.items()} for world, found in by.items()
        },
        "regret": round(max(median(r) for r in regrets.values()), 4),
        "regret_worst_seed": round(max(max(r) for r in regrets.values()), 4),
        "regrets": {world: round(median(r), 4) for world, r in regrets.items()},
        "worst_vs_off": round(min(min(v.values()) for v in vs_off.values()), 4),
        "vs_off": {world: {str(b): round(x, 3) for b, x in v.items()} for world, v in vs_off.items()},
        "ahead_on_drain": {world: _lead(found) for world, found in by.items() if world.endswith("/drain")},
        "targets": TARGETS,
    }


def _lead(found: dict[str, Cell]) -> dict[str, Any]:
    """Ours against the best of the others (the oracle apart): median over the seeds of the ratio, seed by seed."""
    others = [c for name, c in found.items() if name not in (ORACLE, OURS)]
    best = max(others, key=lambda c: median(c.tokens_per_s))
    ratios = [a / b for a, b in zip(found[OURS].tokens_per_s, best.tokens_per_s, strict=True)]
    return {"best_other": best.selector, "ratio": round(median(ratios), 4), "lowest": round(min(ratios), 4)}


def _table(cells: Sequence[Cell]) -> str:
    oracle = next(c for c in cells if c.selector == ORACLE)
    lines = [f"{cells[0].world:<22}{'tokens/s':>10}{'of oracle':>11}   to OFF by running requests"]
    for c in cells:
        share = median(a / b for a, b in zip(c.tokens_per_s, oracle.tokens_per_s, strict=True))
        ratios = "  ".join(f"{start}+ {x:.2f}" for start, x in c.vs_off.items())
        lines.append(f"{c.selector:<22}{median(c.tokens_per_s):>10.1f}{share:>11.3f}   {ratios}")
    return "\n".join(lines)
