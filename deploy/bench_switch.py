"""`longtail bench switch`: what switching speculation on and off costs requests that are under way with long contexts.

All requests run with OFF, then every round with a chain of the EAGLE drafter, then with OFF again. Stall: by how much
the longest round after a switch exceeds the usual OFF round, in usual OFF rounds. Beside it what the same switch costs
when the drafter is fed all contexts at once, and when contexts go through the target again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from deploy.bench_rollout import Bench
from deploy.provenance import provenance
from services.config.schema import ClusterConfig
from services.config.speculation import eagle_chain
from services.core.errors import ConfigError
from services.core.types import AcceptanceStats, GroupWork, PartialRollout, SamplingParams
from services.models.target import TargetModel
from services.rollout.eagle import CATCH_UP_CHUNK, EagleDrafting
from services.rollout.native import EngineOptions, NativeEngine
from services.rollout.rows import Rows
from services.speculation.round import RoundOutcome
from services.speculation.selector import Fixed
from services.speculation.strategy import OFF, draft_strategy

ON = draft_strategy(eagle_chain(2))
STEADY = 24  # rounds of each usual state


@dataclass(frozen=True)
class Switch:
    """Seconds, one repeat. `rounds`: until all requests draft; `extra`: beyond usual rounds over all of those."""

    off_round: float
    on_round: float
    longest_on: float
    rounds: int
    extra: float
    longest_off: float

    @property
    def stall_on(self) -> float:
        return self.longest_on / self.off_round - 1

    @property
    def stall_off(self) -> float:
        return self.longest_off / self.off_round - 1


class Watcher(Fixed):
    """OFF unless forced; keeps what the last round brought."""

    last: RoundOutcome | None = None

    def record(self, outcome: RoundOutcome) -> None:
        self.last = outcome


class SwitchBench:
    """One engine whose requests have `context` tokens, nearly all of them response, and go on for as long again."""

    def __init__(self, config: ClusterConfig, running: int, context: int) -> None:
        bench, self._running = Bench(config), running
        self._clock: Callable[[], float] = time.process_time if bench.device.type == "cpu" else time.perf_counter
        self._bench, self._drafter_version, self._watcher = bench, 0, Watcher(OFF)
        options = EngineOptions(running, 2 * context, ON.num_draft_tokens)
        target = TargetModel(bench.spec, 2 * context + options.spare_columns, bench.device, torch.float32)
        self.engine = NativeEngine(target, options, self._watcher, bench.tokenizer.decode, self._clock)
        self.engine.load_policy(0, bench.tensors)
        self.engine.load_drafter(0, bench.drafter)
        prompt = bench.heldout[0]
        known = context - len(prompt.token_ids)
        ids = [t for p in bench.heldout for t in p.token_ids]
        said = tuple(ids[i % len(ids)] for i in range(known))
        sampling = SamplingParams(max_tokens=2 * context - len(prompt.token_ids))  # no end before the last token
        partials = tuple(
            PartialRollout("g", i, said, (0.0,) * known, (0,), (), AcceptanceStats(), 0.0) for i in range(running)
        )
        indices = tuple(range(running))
        self.engine.submit([GroupWork("g", prompt, indices, indices, sampling, partials=partials)])
        self.engine.step()

    def round(self) -> float:
        started = self._clock()
        self.engine.step()
        return self._clock() - started

    def repeat(self) -> Switch:
        """OFF, ON until all requests have drafted for a while, OFF."""
        self._drafter_version += 1
        self.engine.load_drafter(self._drafter_version, self._bench.drafter)  # the drafter knows nothing of any context
        self.engine.force_strategy(OFF)
        off_round = median([self.round() for _ in range(STEADY)])
        self.engine.force_strategy(ON)
        catching = []
        while not self._all_draft():
            if self.engine.num_running < self._running:
                raise ConfigError("requests ended before all of them drafted: raise --context, or lower --repeats")
            catching.append(self.round())
        on_round = median([self.round() for _ in range(STEADY)])
        self.engine.force_strategy(OFF)
        longest_off = max(self.round() for _ in range(STEADY))
        extra = sum(catching) - len(catching) * off_round
        return Switch(off_round, on_round, max(catching), len(catching), extra, longest_off)

    def _all_draft(self) -> bool:
        last = self._watcher.last
        return last is not None and last.tried[:1] == (self._running,)

    @torch.no_grad()
    def at_once(self, context: int) -> tuple[float, float]:
        """Seconds in which the drafter, and the target, run over such contexts without a round between."""
        running, spec, device = self._running, self._bench.spec, self._bench.device
        target = TargetModel(spec, context + CATCH_UP_CHUNK + 2, device, torch.float32)
        target.load(self._bench.tensors)
        rows = Rows(target, running, context, CATCH_UP_CHUNK + 2)
        ids = [t for p in self._bench.heldout for t in p.token_ids]
        started = self._clock()
        rows.add_group([ids[i % len(ids)] for i in range(context)], 1)
        again = (self._clock() - started) * running
        rows.close(0)
        rows.add_group([ids[i % len(ids)] for i in range(context)], running)
        eagle = EagleDrafting(rows)
        eagle.load(self._bench.drafter)
        started = self._clock()
        eagle.feed(eagle.missing().tolist())
        return self._clock() - started, again


def run_bench(config: ClusterConfig, repeats: int, running: int, context: int) -> dict[str, Any]:
    """Medians over the repeats; the first one warms up and is dropped."""
    bench = SwitchBench(config, running, context)
    found = [bench.repeat() for _ in range(repeats + 1)][1:]
    at_once = bench.at_once(context)
    off_round = median(s.off_round for s in found)
    result = {
        "bench": "switch",
        **provenance(),
        "running": running,
        "context_tokens": context,
        "strategy": ON.name,
        "threads": 1,
        "repeats": repeats,
        "stall_on_steps": round(median(s.stall_on for s in found), 2),
        "stall_on_steps_all": [round(s.stall_on, 2) for s in found],
        "stall_off_steps": round(median(s.stall_off for s in found), 2),
        "stall_off_steps_all": [round(s.stall_off, 2) for s in found],
        "rounds_until_all_draft": median(s.rounds for s in found),
        "extra_steps_until_all_draft": round(median(s.extra / s.off_round for s in found), 1),
        "drafter_at_once_steps": round(at_once[0] / off_round, 1),
        "target_again_steps": round(at_once[1] / off_round, 1),
        "seconds": [asdict(s) for s in found],
    }
    for key in ("stall_on_steps", "stall_off_steps", "rounds_until_all_draft", "extra_steps_until_all_draft",
                "drafter_at_once_steps", "target_again_steps"):  # fmt: skip
        print(f"{key:<30}{result[key]:>10}")
    return result
