"""`longtail bench rounds`: what a round takes through a rollout server, by strategy, running requests and context.

A response of the model's own to its longest prompt gives the context: every request begins with so many of its tokens
and goes on from there. The first go of each cell is not counted: it compiles kernels, and leaves the context in the
prefix cache of an engine that has one. Milliseconds are from the first request's start to the last one's end, divided
by the rounds of the request with the most. With OFF a round is a token. An engine that switches between strategies runs
OFF as a round without drafts, in which its drafter keeps up; `--set 'speculation.selector={type: fixed, strategy:
{drafter: off}}'` measures one without a drafter. Beside it the processor time of the process that computes most: where
that is as much as a round takes, a faster GPU would not help.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import psutil

from deploy.bench_server import EPOCH, loaded_server
from deploy.inputs import load_inputs
from deploy.processes import descendants, processor_s
from deploy.provenance import provenance
from services.config.naming import strategy_name
from services.config.schema import ClusterConfig, SGLangEngine
from services.core.errors import ConfigError, WaitTimeoutError
from services.core.types import GroupWork, Prompt, Rollout
from services.models.files import model_dir, read_grown
from services.rollout.sglang.build import slot_arguments
from services.speculation.strategy import OFF

PROMPTS = 400
GO_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Cell:
    """So many requests at once, each with about so many tokens of context."""

    running: int
    context: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one cell took with one strategy; `rounds`: how many were measured. `processor_ms`: processor time by rounds,
    of the process that took most (SGLang's scheduler, this one with the native engine), prefill included."""

    running: int
    context: int
    strategy: str
    ms: float
    tokens_per_s: float
    acceptance_length: float | None
    rounds: int
    processor_ms: float


def parse_cells(text: str) -> tuple[Cell, ...]:
    """Of "1x500,16x3000". Raises ConfigError."""
    try:
        cells = tuple(Cell(*map(int, part.split("x"))) for part in text.split(","))
    except (ValueError, TypeError):
        raise ConfigError(f"--cells {text}: give REQUESTSxCONTEXT, several by comma, as in 1x500,16x3000") from None
    if any(cell.running < 1 or cell.context < 1 for cell in cells):
        raise ConfigError(f"--cells {text}: requests and tokens of context are 1 or more")
    return cells


class Rounds:
    """One rollout server in this process, with policy and drafter."""

    def __init__(self, config: ClusterConfig) -> None:
        self._inputs = load_inputs(config)
        self._service = loaded_server(config)
        self.strategies = list(dict.fromkeys((OFF.name, *map(strategy_name, config.speculation.strategies))))
        self._calls = 0

    def context(self, tokens: int) -> tuple[int, ...]:
        """At least `tokens` of one prompt and its response. Raises ConfigError when responses end before."""
        prompt = max((p.token_ids for p in islice(self._inputs.train, PROMPTS)), key=len)
        (rollout,) = self._go([prompt], max(1, tokens - len(prompt)), self.strategies[-1])
        found = (*prompt, *rollout.response_ids)
        if len(found) < tokens:
            raise ConfigError(f"the response to the longest prompt ends after {len(found)} tokens: name shorter cells")
        return found

    def measure(self, cell: Cell, known: Sequence[int], strategy: str, tokens: int, seconds: float) -> Row:
        """Goes of `tokens` tokens each until `seconds` have been measured."""
        contexts = [known[: max(1, cell.context - i)] for i in range(cell.running)]  # no two alike
        self._go(contexts, tokens, strategy)
        took, rounds, made, steps, before = 0.0, 0, 0, 0, processor_seconds()
        while took < seconds:
            finished = self._go(contexts, tokens, strategy)
            took += max(r.finished_s for r in finished) - min(r.started_s for r in finished)
            rounds += max(_rounds(r, strategy) for r in finished)
            made += sum(len(r.response_ids) for r in finished)
            steps += sum(_rounds(r, strategy) for r in finished)
        length = None if strategy == OFF.name else round(made / steps, 3)
        busiest = max(s - before.get(pid, 0.0) for pid, s in processor_seconds().items())
        ms, processor_ms = (round(1000 * s / rounds, 3) for s in (took, busiest))
        return Row(cell.running, cell.context, strategy, ms, round(made / took), length, rounds, processor_ms)

    def _go(self, contexts: Sequence[Sequence[int]], tokens: int, strategy: str) -> list[Rollout]:
        self._service.set_strategy(strategy, EPOCH)
        self._calls += 1
        sampling = replace(self._inputs.sampling, max_tokens=tokens)
        first = 1000 * self._calls  # no two goes draw alike
        work = [
            GroupWork(f"{self._calls}.{i}", Prompt(f"{i}", "", tuple(ids), "", "bench"), (0,), (first + i,), sampling)
            for i, ids in enumerate(contexts)
        ]
        self._service.submit(work, EPOCH)
        finished, give_up_s = list[Rollout](), time.monotonic() + GO_LIMIT_S
        while len(finished) < len(work):
            if time.monotonic() > give_up_s:
                raise WaitTimeoutError(
                    f"{len(finished)} of {len(work)} responses after {GO_LIMIT_S:.0f} s: see its log"
                )
            finished += self._service.advance(0.05, EPOCH).finished
        return finished


def processor_seconds() -> dict[int, float]:
    """By process, of this one and those that it started, until now."""
    found = dict[int, float]()
    for process in (psutil.Process(), *descendants()):
        try:
            found[process.pid] = processor_s(process)
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
    return found


def _rounds(rollout: Rollout, strategy: str) -> int:
    return len(rollout.response_ids) if strategy == OFF.name else rollout.acceptance.verify_steps


def run_bench(
    config: ClusterConfig, cells: Sequence[Cell], tokens: int, seconds: float, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Raises ConfigError for cells that the engine does not hold, before it is started."""
    engine = config.rollout.engine
    most, longest = max(c.running for c in cells), max(c.context for c in cells)
    if most > engine.max_running or longest + tokens > engine.max_len:
        raise ConfigError(
            f"cells of {most} requests and {longest} + {tokens} tokens exceed rollout.engine.max_running "
            f"{engine.max_running} or max_len {engine.max_len}: raise them, or name smaller cells"
        )
    bench = Rounds(config)
    known = bench.context(longest)
    rows = list[Row]()
    for cell in cells:
        for strategy in bench.strategies:
            rows.append(bench.measure(cell, known, strategy, tokens, seconds))
            say(_line(rows[-1]))
    attention = slot_arguments(config, engine, 0)["attention_backend"] if isinstance(engine, SGLangEngine) else None
    return {
        "bench": "rounds",
        "provenance": provenance(),
        "grown": read_grown(model_dir(config.model.path)),
        "engine": engine.type,
        "attention": attention,
        "temperature": config.rollout.sampling.temperature,
        "rows": [asdict(row) for row in rows],
    }


def _line(row: Row) -> str:
    length = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
    return (
        f"{row.running:4d} x {row.context:5d}  {row.strategy:16} {row.ms:8.2f} ms a round  "
        f"processor {row.processor_ms:6.2f} ms  acceptance length {length:>5}  {row.tokens_per_s:8.0f} tokens/s"
    )
