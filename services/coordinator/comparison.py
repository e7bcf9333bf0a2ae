"""Speculation off against on, measured in the run itself: same prompts, same seeds, same servers, interleaved.

Each repeat takes prompts of its own, and generates them with speculation first: a drafter that remembers responses
(the suffix index) must not have seen the very ones it is measured on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.config.naming import strategy_name
from services.coordinator.assembly import Parts
from services.coordinator.progress import ProgressBoard
from services.coordinator.rollout_phase import RolloutPhase
from services.coordinator.services import Inputs
from services.coordinator.summary import Comparison
from services.coordinator.timeline import Timeline
from services.coordinator.work import make_work
from services.core.types import AcceptanceStats, Prompt, Rollout, SamplingParams

OFF = "off"

# (label, prompts, group size, sampling, forced strategy or None) -> rollouts in group order, wall seconds.
Generate = Callable[[str, Sequence[Prompt], int, SamplingParams, str | None], tuple[list[Rollout], float]]


@dataclass(frozen=True, slots=True)
class ForcedRuns:
    """The comparison as `config.run` asks for it, on the run's own servers."""

    parts: Parts
    phase: RolloutPhase
    timeline: Timeline
    board: ProgressBoard

    def compare(self, inputs: Inputs) -> Comparison:
        config = self.parts.config
        names = dict.fromkeys(strategy_name(s) for s in config.speculation.strategies)
        return compare(
            self._generate,
            inputs.heldout,
            config.run.compare_prompts,
            config.run.compare_repeats,
            config.rollout.group_size,
            inputs.sampling,
            [name for name in names if name != OFF],
        )

    def _generate(
        self, label: str, prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams, name: str | None
    ) -> tuple[list[Rollout], float]:
        fleet, clock = self.parts.fleet, self.parts.clock
        self.timeline.enter(f"{label} {name or 'selector'}")
        self.board.begin("comparison", len(prompts) * group_size)
        works = make_work(prompts, label, group_size, sampling, self.parts.config.run.seed)
        fleet.force(name)
        start = clock()
        groups = sorted(self.phase.generate(works, drafters=0), key=lambda g: g.group_id)
        seconds = clock() - start
        fleet.forced = None
        return [r for g in groups for r in g.rollouts], seconds


def compare(
    generate: Generate,
    prompts: Sequence[Prompt],
    num_prompts: int,
    repeats: int,
    group_size: int,
    sampling: SamplingParams,
    strategies: Sequence[str],
) -> Comparison:
    """`strategies` are the names that greedy decoding is checked with, each against plain decoding."""
    off_s: list[float] = []
    on_s: list[float] = []
    accepted: list[AcceptanceStats] = []
    for repeat in range(-1, repeats):
        chosen = _slice(prompts, repeat + 1, num_prompts)
        label = f"compare{repeat + 1}"
        on, on_seconds = generate(label, chosen, group_size, sampling, None)
        _, off_seconds = generate(label, chosen, group_size, sampling, OFF)
        if repeat >= 0:  # the first round only warms up
            on_s.append(on_seconds)
            off_s.append(off_seconds)
            accepted += [r.acceptance for r in on]
    chosen = _slice(prompts, repeats + 1, num_prompts)
    return Comparison(
        rollout_seconds_off=statistics.median(off_s),
        rollout_seconds_on=statistics.median(on_s),
        greedy_mismatches=greedy_mismatches(generate, chosen, sampling, strategies),
        acceptance_length_on=AcceptanceStats.merged(accepted).acceptance_length,
        repeats=repeats,
        greedy_checked=len(chosen) * len(strategies),
    )


def greedy_mismatches(
    generate: Generate, prompts: Sequence[Prompt], sampling: SamplingParams, strategies: Sequence[str]
) -> int:
    """How many greedy responses differ from plain decoding, over all strategies. Lossless speculation gives 0."""
    greedy = replace(sampling, temperature=0.0)
    plain, _ = generate("greedy", prompts, 1, greedy, OFF)
    count = 0
    for name in strategies:
        drafted, _ = generate("greedy", prompts, 1, greedy, name)
        count += sum(a.response_ids != b.response_ids for a, b in zip(plain, drafted, strict=True))
    return count


def _slice(prompts: Sequence[Prompt], number: int, size: int) -> list[Prompt]:
    return [prompts[(number * size + i) % len(prompts)] for i in range(size)]
