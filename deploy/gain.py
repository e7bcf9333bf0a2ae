"""What drafting is expected to gain, before a run: lengths x acceptance x costs, replayed by `speculation/gain.py`."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import Any

from deploy.replay import COSTS, read_costs
from services.config.schema import ClusterConfig
from services.config.schema import NativeEngine as NativeEngineConfig
from services.core.errors import ConfigError
from services.core.gain import Workload
from services.core.spans import bucket_name, running_bucket
from services.report.rollouts_file import read_columns
from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.gain import GivenAcceptance, Replay, Stretch, deal, predict
from services.speculation.strategy import DraftStrategy, draft_strategy

MEASURE_S = 8.0  # of calibration where no costs are given
ASSUMED_ACCEPTANCE, ASSUMED_SIGMA = 0.7, 1.0
LEAST_TRIES = 50  # of a position, before a run's acceptance there is believed


@dataclass(frozen=True)
class Question:
    """As asked on the command line; None: not said."""

    costs: str | None
    lengths: Path | None
    lognormal: tuple[float, float] | None
    acceptance: tuple[float, ...] | None
    prompt_tokens: int | None
    rollout_share: float | None


@dataclass(frozen=True)
class Lengths:
    values: tuple[int, ...]
    prompt_tokens: float | None
    acceptance: tuple[float, ...] | None
    source: str


@dataclass(frozen=True)
class Answer:
    """`replays` by server; `phase_*`: until the slowest server is done."""

    work: Workload
    servers: int
    sources: tuple[str, ...]
    replays: tuple[Replay, ...]
    rollout_share: float | None

    @property
    def phase_on_s(self) -> float:
        return max(r.gain.on_s for r in self.replays)

    @property
    def phase_off_s(self) -> float:
        return max(r.gain.off_s for r in self.replays)

    @property
    def phase_gain(self) -> float:
        return self.phase_off_s / self.phase_on_s

    @property
    def step_gain(self) -> float | None:
        """`rollout_share`: of a step with OFF, what the rollout phase takes."""
        share = self.rollout_share
        return None if share is None else 1 / (1 - share + share / self.phase_gain)


def answer(config: ClusterConfig, question: Question) -> Answer:
    """Raises ConfigError naming the remedy where something needed is not known."""
    rollout = config.rollout
    lengths = _lengths(question, rollout.group_size * rollout.prompts_per_step, rollout.sampling.max_tokens)
    rates, told = _acceptance(question, lengths)
    arms = [draft_strategy(s) for s in config.speculation.strategies if s.drafter in ("off", "eagle")]
    if all(arm.is_off for arm in arms):
        raise ConfigError(
            "this configuration drafts with no EAGLE strategy, and of others the acceptance cannot be given"
        )
    table, costs = _costs(config, question, arms)
    prompt = question.prompt_tokens or lengths.prompt_tokens or config.data.max_prompt_tokens / 2
    capacity, temperature = rollout.engine.max_running, rollout.sampling.temperature
    work = Workload(lengths.values, rollout.group_size, prompt, capacity, temperature)
    replays = tuple(predict(part, arms, table, GivenAcceptance(rates)) for part in deal(work, rollout.num_servers))
    return Answer(work, rollout.num_servers, (lengths.source, told, costs), replays, question.rollout_share)


# ---------------------------------------------------------------------------- what is needed


def _lengths(question: Question, count: int, max_tokens: int) -> Lengths:
    if question.lengths is not None:
        return _known_lengths(question.lengths, count, max_tokens)
    median, sigma = question.lognormal or (max_tokens / 10, ASSUMED_SIGMA)
    if median < 1 or sigma < 0:
        raise ConfigError(
            f"--lognormal {median:g},{sigma:g}: give the median in tokens, at least 1, and sigma, such as 200,1.0"
        )
    said = "" if question.lognormal else " (assumed: --lengths RUN_DIR knows better)"
    normal = NormalDist(log(median), sigma) if sigma else None
    drawn = [exp(normal.inv_cdf((i + 0.5) / count)) if normal else median for i in range(count)]
    values = [min(max_tokens, max(1, round(n))) for n in drawn]
    return Lengths(
        _shuffled(values), None, None, f"log-normal, median {median:g}, sigma {sigma:g}, cut at {max_tokens}{said}"
    )


def _known_lengths(path: Path, count: int, max_tokens: int) -> Lengths:
    if path.is_dir():
        return _lengths_of_run(path, count)
    if not path.is_file():
        raise ConfigError(f"{path} is neither a run folder nor a file of lengths (numbers, in any layout)")
    try:
        found = [int(float(word)) for word in path.read_text(encoding="utf-8").replace(",", " ").strip("[] \n").split()]
    except ValueError as error:
        raise ConfigError(f"{path} holds something else than numbers: {error}") from error
    values = [min(max_tokens, n) for n in found if n >= 1]
    if not values:
        raise ConfigError(f"{path} holds no length of at least 1 token")
    return Lengths(_resampled(values, count), None, None, f"{len(values)} lengths of {path.name}, cut at {max_tokens}")


def _lengths_of_run(run_dir: Path, count: int) -> Lengths:
    """Of the last step with rollouts, and how its drafts were accepted when one strategy made them all."""
    files = sorted((run_dir / "rollouts").glob("step_*.parquet"))
    if not files:
        raise ConfigError(f"{run_dir} has no rollouts yet: give lengths by --lognormal MEDIAN,SIGMA")
    columns = ["step", "response_len", "prompt_ids", "acceptance_histogram", "steps_by_strategy"]
    rows = read_columns(files[-1], columns)
    values = [max(1, int(r["response_len"])) for r in rows]
    prompt = sum(len(r["prompt_ids"]) for r in rows) / len(rows)
    taken = tuple(values) if len(values) == count else _resampled(values, count)
    return Lengths(taken, prompt, _accepted(rows), f"step {rows[0]['step']} of {run_dir.name}")


def _accepted(rows: Sequence[dict[str, Any]]) -> tuple[float, ...] | None:
    """By position given those before. Strategies of several depths cannot be told apart in a histogram."""
    used = {name for r in rows for name, steps in dict(r["steps_by_strategy"]).items() if name != "off" and steps}
    if len(used) != 1:
        return None
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(dict(enumerate(row["acceptance_histogram"])))
    tries = [sum(n for k, n in counts.items() if k >= at) for at in range(max(counts, default=0) + 1)]
    rates = [after / before for before, after in pairwise(tries) if before >= LEAST_TRIES]
    return tuple(rates) or None


def _acceptance(question: Question, lengths: Lengths) -> tuple[tuple[float, ...], str]:
    rates = question.acceptance or lengths.acceptance
    if rates is None:
        return (
            ASSUMED_ACCEPTANCE,
        ), f"{ASSUMED_ACCEPTANCE} at every position (assumed: --acceptance 0.8,0.7,... says it)"
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"--acceptance {', '.join(map(str, rates))}: each must be between 0 and 1")
    told = ", ".join(f"{rate:.2f}" for rate in rates)
    return rates, told if question.acceptance else f"{told}, of the run's rollouts"


def _costs(config: ClusterConfig, question: Question, arms: Sequence[DraftStrategy]) -> tuple[CostTable, str]:
    known = ", ".join(sorted(file.stem for file in COSTS.glob("*.json")))
    if question.costs is not None:
        path = Path(question.costs)
        folder, name = (path.parent, path.stem) if path.suffix == ".json" else (COSTS, question.costs)
        if not (folder / f"{name}.json").is_file():
            raise ConfigError(f"--costs {question.costs}: no such file; recorded are {known}")
        recorded = read_costs(name, folder)
        return recorded.table, f"{name} ({_quality(recorded.table, recorded.points)})"
    engine = config.rollout.engine
    if not isinstance(engine, NativeEngineConfig):
        raise ConfigError(f"costs of an SGLang engine are measured while it runs: name recorded ones, --costs {known}")
    from deploy.bench_costs import measured  # loads a model

    strategies = list(dict.fromkeys([draft_strategy(s) for s in config.speculation.strategies] + list(arms)))
    points = measured(config, strategies, engine.max_running, engine.max_len, MEASURE_S)
    table = CostTable.fit(points)
    return table, f"measured on this machine for {MEASURE_S:g} s ({_quality(table, points)})"


def _quality(table: CostTable, points: Sequence[CostPoint]) -> str:
    context = max(p.view.context_tokens / p.view.running for p in points)
    running = max(p.view.running for p in points)
    reach = f"measured to {running} requests of {context:.0f} tokens, what lies beyond is a guess"
    return f"the fit is off by {table.spread:.0%}; {reach}"


def _resampled(values: Sequence[int], count: int) -> tuple[int, ...]:
    ordered = sorted(values)
    return _shuffled([ordered[int((i + 0.5) / count * len(ordered))] for i in range(count)])


def _shuffled(values: Sequence[int]) -> tuple[int, ...]:
    """In an order that does not depend on anything: lengths of a group and of its neighbours are not alike."""
    mixed = list(values)
    random.Random(len(mixed)).shuffle(mixed)
    return tuple(mixed)


# ---------------------------------------------------------------------------- what is said


@dataclass(frozen=True)
class BucketGain:
    """While so many requests run at a server: seconds with the best strategies, of all servers; the strategies by their
    seconds; tokens per second, and how many times OFF's that is."""

    running: str
    seconds: float
    strategies: tuple[str, ...]
    tokens_per_s: float
    speedup: float


def by_bucket(found: Answer) -> list[BucketGain]:
    """From many running requests to few."""
    on = _sums([s for r in found.replays for s in r.on])
    off = _sums([s for r in found.replays for s in r.off])
    rows = []
    for bucket in sorted(on, reverse=True):
        seconds, tokens, by_name = on[bucket]
        rate, off_rate = tokens / seconds, off[bucket][1] / off[bucket][0] if bucket in off else None
        names = tuple(sorted(by_name, key=lambda name: -by_name[name]))
        rows.append(BucketGain(bucket_name(bucket), seconds, names, rate, rate / off_rate if off_rate else 1.0))
    return rows


def _sums(stretches: Sequence[Stretch]) -> dict[int, tuple[float, float, dict[str, float]]]:
    """Seconds, tokens, and seconds by strategy, by bucket."""
    found: dict[int, tuple[float, float, dict[str, float]]] = {}
    for one in stretches:
        if not one.seconds:
            continue
        seconds, tokens, by_name = found.get(running_bucket(one.running), (0.0, 0.0, {}))
        by_name[one.strategy] = by_name.get(one.strategy, 0.0) + one.seconds
        found[running_bucket(one.running)] = seconds + one.seconds, tokens + one.tokens, by_name
    return found


def lines(found: Answer) -> Iterator[str]:
    work, ordered = found.work, sorted(found.work.lengths)
    middle, longest = ordered[len(ordered) // 2], ordered[-1]
    servers = f"{found.servers} server{'s' * (found.servers > 1)}"
    yield (
        f"{len(ordered)} rollouts on {servers}, {work.capacity} at once on each; responses of {middle} tokens in the "
        f"median, {longest} at most; prompts of {work.prompt_tokens:.0f}"
    )
    for what, text in zip(("lengths", "acceptance", "costs"), found.sources, strict=True):
        yield f"  {what}: {text}"
    seconds = f"{found.phase_off_s:.2f} s with OFF, {found.phase_on_s:.2f} s with the best strategies"
    yield f"decoding of the rollout phase: {seconds}"
    yield f"predicted speed-up of the rollout phase: {found.phase_gain:.2f}"
    if found.step_gain is not None:
        yield f"of the step, {found.rollout_share:.0%} of which is rollout with OFF: {found.step_gain:.2f}"
    yield ""
    yield f"{'running':<10}{'seconds':>9}{'tokens/s':>10}{'times OFF':>11}  strategies, the longest used first"
    for row in by_bucket(found):
        rates = f"{row.seconds:>9.2f}{row.tokens_per_s:>10.0f}{row.speedup:>11.2f}"
        yield f"{row.running:<10}{rates}  {', '.join(row.strategies)}"


def as_json(found: Answer) -> str:
    return json.dumps(
        {
            "predicted_gain": found.phase_gain,
            "predicted_step_gain": found.step_gain,
            "rollout_seconds_off": found.phase_off_s,
            "rollout_seconds_on": found.phase_on_s,
            "lengths": found.sources[0],
            "acceptance": found.sources[1],
            "costs": found.sources[2],
            "buckets": [
                {"running": r.running, "seconds": r.seconds, "tokens_per_s": r.tokens_per_s, "times_off": r.speedup,
                 "strategies": r.strategies}
                for r in by_bucket(found)
            ],
        }
    )  # fmt: skip
