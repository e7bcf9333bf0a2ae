"""A recorded run again, in the simulation, on what other recorded runs cost (`recorded`).

Its own are the configuration, the lengths and the prompts, which groups had a signal to learn from, how often drafts
were accepted by position, and, where its drafter was trained, the seconds of a micro-step (all slot seconds of drafting
over their micro-steps, so with adopting and merging states) and what loading a drafter added to publishing. Drafts of
all requests are taken to be accepted alike, and an estimate of acceptance to take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from statistics import median

from services.config.schema import ClusterConfig
from services.coordinator.work import in_passes
from services.core.errors import DataError
from services.core.types import Prompt, StepMetrics
from services.simulator.learning import GivenAcceptance
from services.simulator.recorded import Basis, rules_of
from services.simulator.recorded_acceptance import acceptance_of
from services.simulator.run_record import RecordedRun
from services.simulator.scenario import Recorded, Scenario, Seconds
from services.simulator.world import simulate


def predicted(run: RecordedRun, basis: Basis) -> list[StepMetrics]:
    """The run again, on what `basis` says that things cost. Raises DataError when it cannot be simulated."""
    basis.check_drafters(run)
    known = {(r.group_id, r.index): r.tokens for r in run.responses}
    scenario = Scenario(
        basis.table,
        Recorded(known),
        GivenAcceptance(chain=acceptance_of(run) or (0.0,)),
        with_drafter(basis.seconds_for(run), run),
        prefill_rate=basis.prefill_rate(run),
        dense=rules_of(run.config).dense,
        prompts=prompts_of(run),
        trained={step.metrics.step: step.tokens(run.of_flat) for step in run.steps},
    )
    steps = simulate(simulated_config(run), scenario, lambda: 0.0).steps
    return [replace(m, rollout_s=m.rollout_s + basis.around_s(run)) for m in steps]


def with_drafter(seconds: Seconds, run: RecordedRun) -> Seconds:
    """With the drafter's, as far as the run trained one."""
    steps = [step.metrics for step in run.steps]
    micro_steps, drafting_s = sum(m.drafter_micro_steps for m in steps), sum(m.drafting_s for m in steps)
    if micro_steps:
        seconds = replace(seconds, micro_step=drafting_s / micro_steps)
    return replace(seconds, load_drafter=_load_drafter_s(steps))


def _load_drafter_s(steps: Sequence[StepMetrics]) -> float:
    """How much longer publishing took where a drafter came along."""
    loads: dict[bool, list[float]] = {True: [], False: []}
    for before, after in pairwise(steps):
        loads[after.drafter_version != before.drafter_version].append(after.publish_s)
    return max(0.0, median(loads[True]) - median(loads[False])) if loads[True] and loads[False] else 0.0


def simulated_config(run: RecordedRun) -> ClusterConfig:
    """The run's own, but for what a simulation does without: engines that keep states, a policy on the slots' GPUs
    (whose turns are within the recorded seconds), evaluations, checkpoints, dynamic sampling."""
    tree = run.config.model_dump()
    tree["drafter"]["states"] = "policy"
    tree["placement"] |= {"policy": "split", "resident": False, "policy_workers": 1}
    tree["drafter"]["training"]["beside_policy"] = run.config.drafts_beside_policy
    tree["policy"]["algorithm"]["dynamic_sampling"] = None
    tree["run"] |= {
        "steps": len(run.steps),
        "eval_prompts": 0,
        "compare_prompts": 0,
        "checkpoint_every": 0,
        "checkpoint_url": None,
    }
    return ClusterConfig.model_validate(tree)


def prompts_of(run: RecordedRun) -> dict[str, int]:
    """Their tokens, so arranged that the coordinator draws for each group its own; named by the groups."""
    per_step = run.config.rollout.prompts_per_step
    drawn = list[tuple[str, int]]()
    for step in run.steps:
        groups = sorted({r.group_id: r.prompt_tokens for r in step.responses}.items(), key=_position)
        if len(groups) != per_step:
            raise DataError(
                f"{run.name} has {len(groups)} groups in step {step.metrics.step} and not rollout.prompts_per_step "
                f"({per_step}): further prompts of dynamic sampling are not simulated; record a run without "
                "policy.algorithm.dynamic_sampling"
            )
        drawn += groups
    places = islice(in_passes(_numbered(len(drawn)), 0, str(run.config.run.seed)), len(drawn))
    arranged = {int(place.id): group for place, group in zip(places, drawn, strict=True)}
    return dict(arranged[i] for i in range(len(drawn)))


def _position(group: tuple[str, int]) -> int:
    return int(group[0].rpartition("/")[2])


def _numbered(count: int) -> Sequence[Prompt]:
    return [Prompt(str(i), "", (), "", "") for i in range(count)]
