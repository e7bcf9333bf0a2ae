"""`longtail simulate`: a run on GPUs that are not there. Costs of one card are measured, everything else is stated."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from deploy.modes import drafting_strategies, in_mode
from deploy.replay import read_costs
from services.config.naming import strategy_name
from services.config.schema import ClusterConfig
from services.config.speculation import StrategyConfig
from services.core.errors import ConfigError
from services.simulator.learning import Learning
from services.simulator.scenario import Lengths, LogNormal, Scenario, Seconds
from services.simulator.shapes import SHAPES, Shape, costs_of
from services.simulator.world import Simulated, simulate

TABLE = "h100-7b"
MODES = ("off", "static", "full")
COLLECT_EVERY = 1_000_000  # objects more than before
TRIAL_SLOTS = 8  # on which the best fixed strategy is looked for


@dataclass(frozen=True)
class Question:
    """As asked on the command line. `rollouts`: of a slot and step, so that clusters of all sizes have as much to do
    for each. `advance_s`: how often a server reports (rollout.advance_budget_s). `steps` and one more that warms up."""

    gpus: tuple[int, ...] = (8, 64, 512)
    shapes: tuple[str, ...] = ("7b",)
    median: float = 2000.0
    sigmas: tuple[float, ...] = (1.0,)
    max_tokens: int = 16_384
    rollouts: int = 64
    failures: tuple[float, ...] = (0.0,)
    steps: int = 3
    advance_s: float = 1.0
    stretch: int = 100
    modes: tuple[str, ...] = MODES
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """One simulated cluster."""

    gpus: int
    shape: str
    sigma: float
    failures: float
    mode: str
    strategy: str | None = None


@dataclass(frozen=True)
class Row:
    """Of one point; seconds are medians over the steps after the first, shares of the slot time in rollout phases, and
    in the policy's where slots may train beside it. `freed_share`: neither generating nor waiting for work that a slot
    could have; `reclaimed_share`: the part of it that trained the drafter. Messages are answers to the coordinator;
    `load`: processor seconds of its code per virtual second, transport apart."""

    point: Point
    slots: int
    step_s: float
    rollout_s: float
    policy_s: float
    publish_s: float
    tokens_per_s: float
    acceptance_length: float | None
    freed_share: float
    reclaimed_share: float
    lost_slots: int
    messages_per_s: float
    messages_per_cpu_s: float
    load: float
    virtual_s: float
    real_s: float


def points(question: Question) -> Iterator[Point]:
    for shape in question.shapes:
        for sigma in question.sigmas:
            for failures in question.failures:
                for gpus in question.gpus:
                    for mode in question.modes:
                        yield Point(gpus, shape, sigma, failures, mode)


def answer(config: ClusterConfig, question: Question, say: Callable[[str], None]) -> list[Row]:
    _check(question)
    rows, best = list[Row](), dict[tuple[str, float], StrategyConfig]()
    for point in points(question):
        key = point.shape, point.sigma
        if point.mode == "static" and key not in best:
            best[key] = best_fixed(config, question, point)
        row = run_point(config, question, point, best.get(key))
        rows.append(row)
        say(line(row))
    return rows


def _check(question: Question) -> None:
    for name in question.shapes:
        if name not in SHAPES:
            raise ConfigError(f"--shape {name}: one of {', '.join(SHAPES)}")
        per_slot = SHAPES[name].gpus
        for gpus in question.gpus:
            if gpus < per_slot or gpus % per_slot:
                raise ConfigError(f"--gpus {gpus}: a server of shape {name} takes {per_slot}; give a multiple of that")


def best_fixed(config: ClusterConfig, question: Question, point: Point) -> StrategyConfig:
    """The candidate with the shortest steps on a few slots."""
    small = replace(point, gpus=TRIAL_SLOTS * SHAPES[point.shape].gpus, failures=0.0)

    def step_s(strategy: StrategyConfig) -> float:
        return run_point(config, question, small, strategy).step_s

    return min(drafting_strategies(config), key=step_s)


def run_point(config: ClusterConfig, question: Question, point: Point, best: StrategyConfig | None) -> Row:
    shape = SHAPES[point.shape]
    run = sized(in_mode(config, point.mode, best), question, point.gpus // shape.gpus)
    if point.mode == "static":
        point = replace(point, strategy=strategy_name(run.speculation.strategies[0]))
    lengths = LogNormal(question.median, point.sigma, question.max_tokens, seed=question.seed)
    scenario = scenario_of(shape, lengths, point.gpus, point.failures, question.stretch, question.seed)
    began = time.perf_counter()
    with _seldom_collected():
        found = simulate(run, scenario, time.process_time)
    return row_of(point, found, run.drafts_beside_policy, time.perf_counter() - began)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """The collector of cycles walks through every rollout that is kept, again and again, and finds next to nothing:
    a sixth of the time with 256 servers."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def scenario_of(shape: Shape, lengths: Lengths, gpus: int, failures: float, stretch: int, seed: int) -> Scenario:
    return Scenario(
        costs_of(shape, read_costs(TABLE).points), lengths, Learning(), shape.seconds(Seconds()),
        prefill_rate=shape.prefill_rate, policy_gpus=gpus, failures=failures, stretch=stretch, seed=seed,
    )  # fmt: skip


def sized(config: ClusterConfig, question: Question, slots: int) -> ClusterConfig:
    """With so many slots, each with its share of the work. A policy that is not colocated has GPUs of its own."""
    tree = config.model_dump()
    if config.drafter.training.beside_policy is None:
        tree["drafter"]["training"]["beside_policy"] = not config.placement.colocated
    group = tree["rollout"]["group_size"]
    if question.rollouts % group:
        raise ConfigError(f"--rollouts {question.rollouts} is no multiple of rollout.group_size {group}")
    tree["rollout"] |= {"num_servers": slots, "prompts_per_step": slots * question.rollouts // group}
    tree["rollout"]["advance_budget_s"] = question.advance_s
    tree["rollout"]["sampling"]["max_tokens"] = question.max_tokens
    tree["rollout"]["engine"]["max_len"] = max(
        tree["rollout"]["engine"]["max_len"], question.max_tokens + tree["data"]["max_prompt_tokens"]
    )
    if tree["rollout"]["engine"].get("kv_tokens"):
        tree["rollout"]["engine"]["kv_tokens"] = None  # of the preset's own machine
    tree["run"] |= {"steps": question.steps + 1, "seed": question.seed, "checkpoint_every": 0}
    tree["run"] |= {"eval_prompts": 0, "compare_prompts": 0}
    return ClusterConfig.model_validate(tree)


def row_of(point: Point, run: Simulated, beside: bool, real_s: float) -> Row:
    """`beside`: slots may train the drafter while the policy is trained, too."""
    steps = run.steps[1:] or run.steps
    rollout_s = median(m.rollout_s for m in steps)
    slot_s = sum(m.rollout_s + beside * m.policy_s for m in steps) * run.slots
    free_s, drafting_s = sum(m.idle_s + m.drafting_s for m in steps), sum(m.drafting_s for m in steps)
    lengths = [m.acceptance_length for m in steps if m.acceptance_length]
    tokens = sum(m.response_tokens for m in steps) / sum(m.rollout_s for m in steps)
    return Row(
        point=point,
        slots=run.slots,
        step_s=median(m.rollout_s + m.reward_s + m.policy_s + m.publish_s for m in steps),
        rollout_s=rollout_s,
        policy_s=median(m.policy_s for m in steps),
        publish_s=median(m.publish_s for m in steps),
        tokens_per_s=tokens,
        acceptance_length=mean(lengths) if lengths else None,
        freed_share=free_s / slot_s,
        reclaimed_share=drafting_s / free_s if free_s else 0.0,
        lost_slots=run.events.get("slot_lost", 0),
        messages_per_s=run.answers / run.virtual_s,
        messages_per_cpu_s=run.answers / run.coordinator_s if run.coordinator_s else 0.0,
        load=run.coordinator_s / run.virtual_s,
        virtual_s=run.virtual_s,
        real_s=real_s,
    )


def speedups(rows: Sequence[Row], over: str) -> dict[Point, float]:
    """Of the whole step against mode `over` of the same cluster; without that mode there is none."""

    def key(p: Point) -> tuple[Any, ...]:
        return p.gpus, p.shape, p.sigma, p.failures

    base = {key(r.point): r.step_s for r in rows if r.point.mode == over}
    return {r.point: base[key(r.point)] / r.step_s for r in rows if key(r.point) in base}


HEAD = (
    f"{'gpus':>5} {'shape':<5}{'sigma':>6}{'fail/h':>7} {'mode':<7}{'step s':>9}{'rollout s':>10}{'accept':>7}"
    f"{'freed':>7}{'reclaimed':>10}{'lost':>5}{'msg/s':>9}{'load':>7}{'real s':>8}"
)


def line(row: Row) -> str:
    p, length = row.point, row.acceptance_length
    accepted = "-" if length is None else f"{length:.2f}"
    return (
        f"{p.gpus:>5} {p.shape:<5}{p.sigma:>6g}{p.failures:>7g} {p.mode:<7}{row.step_s:>9.1f}{row.rollout_s:>10.1f}"
        f"{accepted:>7}{row.freed_share:>7.0%}{row.reclaimed_share:>10.0%}{row.lost_slots:>5}{row.messages_per_s:>9.0f}"
        f"{row.load:>7.1%}{row.real_s:>8.1f}"
    )


def as_tree(question: Question, rows: Sequence[Row]) -> dict[str, Any]:
    """What is measured and what is not is said beside the figures."""
    over_off, over_static = speedups(rows, "off"), speedups(rows, "static")
    return {
        "simulate": True,
        "measured": f"rounds of a 7B shape on one H100 (deploy/costs/{TABLE}.json), loading and micro-steps on an "
        "H200, processor time of the coordinator's own code in this process",
        "stated": "other shapes by the rules of services/simulator/shapes.py; lengths log-normal; acceptance and its "
        "drift by services/simulator/learning.py",
        "simulated": "all seconds, shares, tokens per second and speed-ups",
        "assumptions": {"learning": asdict(Learning()), "seconds": {n: asdict(SHAPES[n].seconds(Seconds()))
                                                                    for n in question.shapes}},
        "question": asdict(question),
        "rows": [
            {**asdict(r.point), **{k: _rounded(v) for k, v in asdict(r).items() if k != "point"},
             "speedup_over_off": _rounded(over_off.get(r.point)),
             "speedup_over_static": _rounded(over_static.get(r.point))}
            for r in rows
        ],
    }  # fmt: skip


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def write(folder: Path, question: Question, rows: Sequence[Row]) -> None:
    import json

    from services.report.scaling import draw_scaling

    folder.mkdir(parents=True, exist_ok=True)
    tree = as_tree(question, rows)
    (folder / "simulation.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    (folder / "simulation.svg").write_text(draw_scaling(tree["rows"]), encoding="utf-8")
