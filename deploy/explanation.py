"""Which draft strategy ran when and why, as text and as JSON, from the folder of a run that goes on or is over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.core.errors import ConfigError
from services.core.types import StrategySpan
from services.report.history import METRICS, STRATEGIES
from services.report.records import Row, number, read_json, read_lines, to_row
from services.report.strategies import (
    STEP,
    bucket_rows,
    by_bucket,
    by_reason,
    by_strategy,
    gain_of,
    of_steps,
    percent,
    sentences,
    spans_of_rows,
    stretches,
)
from services.report.svg import fmt
from services.report.trace import natural

SHOWN_STEPS, SHOWN_STRETCHES = 12, 24


@dataclass(frozen=True)
class Told:
    """What the folder says: `label` is the phase to tell in detail."""

    run_id: str
    status: str
    spans: Sequence[StrategySpan]
    steps: Sequence[Row]
    label: str


def explain(run_dir: Path, step: int | None, as_json: bool) -> None:
    """Print it. Raises ConfigError when the folder is no run's, or does not know."""
    told = read(run_dir, step)
    if as_json:
        print(json.dumps(as_row(told), allow_nan=False))
        return
    for line in lines(told):
        print(line)


def read(run_dir: Path, step: int | None) -> Told:
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run folder (it has no config.yaml): name a folder under runs/")
    if not (run_dir / STRATEGIES).is_file():
        raise ConfigError(
            f"{run_dir} has no {STRATEGIES}: it is of an older Longtail, which did not write down what its selector "
            f"chose. Go on with the run (longtail train --resume {run_dir}) and its further steps are explained"
        )
    spans = spans_of_rows(read_lines(run_dir / STRATEGIES)[0])
    if not spans:
        raise ConfigError(f"{run_dir} has no rounds yet, or an engine that does not tell them: look again later")
    label = _phase(run_dir, list(dict.fromkeys(s.label for s in spans)), step)
    metrics = {r.get("step"): r for r in read_lines(run_dir / METRICS)[0] if r.get("kind") == "step"}
    about, summary = read_json(run_dir / "run.json") or {}, read_json(run_dir / "summary.json") or {}
    status = str(summary.get("status", "not finished"))
    return Told(str(about.get("run_id", run_dir.name)), status, spans, tuple(metrics.values()), label)


def _phase(run_dir: Path, labels: Sequence[str], step: int | None) -> str:
    """The phase to tell in detail; without `step` the last step, or the last phase of a run before its first."""
    steps = [n for n in labels if n.startswith(STEP)]
    label = f"{STEP}{step}" if step is not None else (steps or labels)[-1]
    if label not in labels:
        known = sorted(steps, key=natural)
        among = f"it has {known[0]} to {known[-1]}" if known else "it has no step yet"
        raise ConfigError(f"{run_dir} has no rounds of {label}: {among}")
    return label


# ---------------------------------------------------------------------------- as text


def lines(told: Told) -> Iterator[str]:
    """The whole answer."""
    counted = of_steps(told.spans) or told.spans
    slots = len({s.slot for s in counted})
    rounds = sum(s.rounds for s in counted)
    of = "training steps" if of_steps(told.spans) else "phases before the first step"
    yield f"run {told.run_id}, {told.status}: {fmt(rounds, 0)} rounds of {slots} server{'s' * (slots > 1)} in {of}"
    yield from (f"  {text}" for text in sentences(counted, told.steps))
    yield ""
    head, rows = bucket_rows(counted, "times OFF's speed")
    yield from _aligned([head, *rows])
    if told.steps:
        yield ""
        yield from _step_table(told)
    yield ""
    yield from _stretch_table(told)


def _step_table(told: Told) -> Iterator[str]:
    """One line of each of the last steps."""
    rows = [["step", "rollout s", "gain", "predicted", "strategies by share of rounds"]]
    for row in told.steps[-SHOWN_STEPS:]:
        mine = [s for s in told.spans if s.label == f"{STEP}{row.get('step')}"]
        used = ", ".join(f"{u.strategy} {percent(u.share)}" for u in by_strategy(mine)) if mine else "not told"
        gains = (fmt(number(row, "achieved_gain")), fmt(number(row, "predicted_gain")))
        rows.append([str(row.get("step")), fmt(number(row, "rollout_s")), *gains, used])
    if len(told.steps) > SHOWN_STEPS:
        yield f"the last {SHOWN_STEPS} of {len(told.steps)} steps:"
    yield from _aligned(rows, left=4)


def _stretch_table(told: Told) -> Iterator[str]:
    """The phase's stretches by slot, in order of time."""
    mine = [s for s in told.spans if s.label == told.label]
    yield f"{told.label}, in order of time:"
    for slot in sorted({s.slot for s in mine}, key=natural):
        found = stretches([s for s in mine if s.slot == slot])
        yield slot
        head = ["seconds", "running", "rounds", "tokens/s", "expected", "OFF expected", "strategy", "why"]
        yield from (f"  {line}" for line in _aligned([head, *map(_stretch, found[:SHOWN_STRETCHES])], left=6))
        if len(found) > SHOWN_STRETCHES:
            yield f"  and {len(found) - SHOWN_STRETCHES} more stretches (--json has all)"


def _stretch(span: StrategySpan) -> list[str]:
    same = span.running_first == span.running_last
    return [
        f"{span.start_s:.2f}-{span.end_s:.2f}",
        str(span.running_last) if same else f"{span.running_first} to {span.running_last}",
        fmt(span.rounds, 0),
        fmt(span.tokens_per_s, 0),
        fmt(span.expected, 0),
        fmt(span.expected_off, 0),
        span.strategy,
        span.reason,
    ]


def _aligned(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Columns of the same width; the first, and those from `left` on when it is not the second, begin at the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            c.ljust(w) if i == 0 or (left > 1 and i >= left) else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


# ---------------------------------------------------------------------------- as JSON


def as_row(told: Told) -> dict[str, Any]:
    """`spans` of the phase told in detail are as in strategies.jsonl, with predicted tokens per second."""
    counted = of_steps(told.spans) or told.spans
    gains = ("step", "predicted_gain", "achieved_gain")
    return {
        "run_id": told.run_id,
        "status": told.status,
        "sentences": sentences(counted, told.steps),
        "gain": gain_of(counted),
        "reasons": by_reason(counted),
        "strategies": [asdict(use) for use in by_strategy(counted)],
        "buckets": [
            {"running": row.name, "rounds": row.rounds, "share": dict(row.share)} for row in by_bucket(counted)
        ],
        "steps": [{name: row.get(name) for name in gains} for row in told.steps],
        "phase": told.label,
        "spans": [
            to_row(s, expected=s.expected, expected_off=s.expected_off) for s in told.spans if s.label == told.label
        ],
    }
