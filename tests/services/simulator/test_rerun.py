"""Recorded runs of a world whose costs are known, predicted from other runs of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from services.config.schema import ClusterConfig
from services.coordinator.work import prompts_of_step
from services.core.errors import DataError
from services.core.types import StepMetrics
from services.simulator.recorded import basis_of, cost_error, rules_of, seconds_of
from services.simulator.rerun import predicted, prompts_of, simulated_config, with_drafter
from services.simulator.run_record import RecordedRun, RecordedStep, read_run
from services.simulator.world import build_inputs
from services.speculation.cost_table import CostTable
from tests.services.simulator.worlds import known_world, lockstep_cluster, record


def on_gpus(config: ClusterConfig, **placement: Any) -> ClusterConfig:
    tree = config.model_dump()
    tree["placement"] |= {"gpus_per_slot": 1.0, "policy_gpus": 1.0, **placement}
    tree["rollout"]["engine"] = {"type": "sglang", "max_running": 32, "release_memory": not placement.get("resident")}
    return ClusterConfig.model_validate(tree)


def means(steps: list[StepMetrics]) -> tuple[float, float]:
    return mean(m.rollout_s for m in steps), mean(m.rollout_s + m.reward_s + m.policy_s + m.publish_s for m in steps)


@pytest.mark.parametrize("name", ["off-2", "chain3-2", "full-2", "chain3"])
def test_other_runs_of_the_world_are_predicted(runs: Mapping[str, RecordedRun], name: str) -> None:
    """Other numbers of servers, and a selector that chooses among strategies."""
    basis = basis_of([runs["off"], runs["chain1"], runs["chain3"]])
    run = runs[name]
    real, found = [s.metrics for s in run.steps], predicted(run, basis)
    assert [m.response_tokens for m in found] == [m.response_tokens for m in real]
    assert means(found) == (pytest.approx(means(real)[0], rel=0.05), pytest.approx(means(real)[1], rel=0.05))


def test_a_wrong_table_predicts_wrongly(runs: Mapping[str, RecordedRun]) -> None:
    basis = basis_of([runs["off"]])
    slow = CostTable({n: 1.2 * v for n, v in basis.table.terms.items()}, basis.table.knots, 0.0)
    found = predicted(runs["off-2"], replace(basis, table=slow))
    assert means(found)[0] > 1.1 * means([s.metrics for s in runs["off-2"].steps])[0]
    assert cost_error(runs["off-2"], replace(basis, table=slow)) == pytest.approx(0.2, abs=0.03)
    assert cost_error(runs["off-2"], basis) == pytest.approx(0.0, abs=0.03)
    assert cost_error(runs["full-2"], basis) is None


def test_ends_that_are_seen_late_do_no_harm(tmp_path: Path) -> None:
    """As SGLang's are: by up to a tenth of a second, a dozen rounds."""
    assumed, rng = replace(known_world(), dense=False), random.Random(0)
    run = read_run(record(on_gpus(lockstep_cluster()), assumed, tmp_path / "one"))
    other = read_run(record(on_gpus(lockstep_cluster(2)), assumed, tmp_path / "two"))

    def late(step: RecordedStep) -> RecordedStep:
        seen = (replace(r, finished_s=r.finished_s + rng.uniform(0, 0.1)) for r in step.responses)
        return replace(step, responses=tuple(seen))

    seen = replace(run, steps=tuple(map(late, run.steps)))
    assert rules_of(run.config).late_s >= 0.1 and basis_of([seen]).used == 3
    found = predicted(other, basis_of([seen]))
    assert means(found)[0] == pytest.approx(means([s.metrics for s in other.steps])[0], rel=0.05)


def test_what_passes_read_of_a_dense_block_is_predicted_as_such(tmp_path: Path) -> None:
    """Where reading is most of a round, one long prompt among short ones makes it much dearer."""
    prompts = {f"prompt-{i}": 900 if i % 8 == 0 else 30 for i in range(32)}
    assumed = known_world(costs=CostTable({"verify/pass": 0.005, "verify/read": 2e-6}, (0.0,), 0.0), prompts=prompts)
    one, two = (read_run(record(lockstep_cluster(n), assumed, tmp_path / f"{n}")) for n in (1, 2))
    found = means(predicted(two, basis_of([one])))[0]
    assert found == pytest.approx(means([s.metrics for s in two.steps])[0], rel=0.05)


def test_the_policy_learns_from_groups_with_a_signal_alone(runs: Mapping[str, RecordedRun]) -> None:
    basis, run = basis_of([runs["off"]]), runs["off"]
    flat = frozenset(f"step00002/{position:04d}" for position in range(6))
    changed = (run.steps[0], replace(run.steps[1], flat=flat), *run.steps[2:])
    whole, part = predicted(run, basis), predicted(replace(run, steps=changed), basis)
    skipped = sum(r.prompt_tokens + r.tokens for r in run.steps[1].responses if r.group_id in flat)
    less = [a.policy_s - b.policy_s for a, b in zip(whole, part, strict=True)]
    expected = basis.seconds_for(run).policy_token * skipped
    assert skipped > 0 and less == pytest.approx([0.0, expected, 0.0, 0.0], abs=1e-9)


def test_the_coordinator_draws_for_each_group_its_own_prompt(tmp_path: Path) -> None:
    lengths = {f"prompt-{i}": 20 + 7 * i for i in range(16)}
    run = read_run(record(lockstep_cluster(2, steps=2), known_world(prompts=lengths), tmp_path / "run"))
    found, inputs = (
        prompts_of(run),
        build_inputs(simulated_config(run), replace(known_world(), prompts=prompts_of(run))),
    )
    recorded = {r.group_id: r.prompt_tokens for r in run.responses}
    assert len(set(recorded.values())) == 16 and found == recorded
    for step in (1, 2):
        drawn = prompts_of_step(inputs.train, step, 16, run.config.run.seed)
        assert [p.id for p in drawn] == [f"step{step:05d}/{i:04d}" for i in range(16)]


def test_what_training_the_drafter_took_is_read_from_the_run(runs: Mapping[str, RecordedRun]) -> None:
    base = runs["off"].steps[0]
    changes: tuple[dict[str, Any], ...] = (
        {"drafter_version": 0, "publish_s": 1.0}, {"drafter_version": 1, "publish_s": 1.5},
        {"drafter_version": 1, "publish_s": 1.1}, {"drafter_version": 2, "publish_s": 1.7},
    )  # fmt: skip
    metrics = [replace(base.metrics, drafter_micro_steps=5, drafting_s=2.0, **c) for c in changes]
    run = replace(runs["off"], steps=tuple(replace(base, metrics=m) for m in metrics))
    found = with_drafter(seconds_of([runs["off"]]), run)
    assert found.micro_step == pytest.approx(0.4) and found.load_drafter == pytest.approx(1.6 - 1.1)


def test_further_prompts_of_dynamic_sampling_are_refused(runs: Mapping[str, RecordedRun]) -> None:
    step = runs["off"].steps[0]
    more = replace(step.responses[0], group_id="step00001/0008")
    run = replace(runs["off"], steps=(replace(step, responses=(*step.responses, more)),))
    with pytest.raises(DataError, match=r"has 9 groups in step 1 and not .* \(8\).*dynamic_sampling"):
        prompts_of(run)


def test_drafts_whose_costs_were_not_seen_are_refused(runs: Mapping[str, RecordedRun]) -> None:
    """A table without them would take them for free."""
    with pytest.raises(DataError, match="drafts with eagle, of which no run of --from tells the costs"):
        predicted(runs["chain3"], basis_of([runs["off"]]))
    assert predicted(runs["chain3"], basis_of([runs["off"], runs["chain1"]]))


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_colocated_policy_is_simulated_on_gpus_of_its_own(
    runs: Mapping[str, RecordedRun], workers: int, resident: bool
) -> None:
    own, parts = runs["off" if workers == 1 else "off-2"], {"gpus_per_slot": 0.6, "policy_gpus": 0.4}
    shared = on_gpus(own.config, policy="colocated", resident=resident, policy_workers=workers, **parts)
    run = replace(own, config=shared)
    assert not simulated_config(run).placement.colocated
    assert not simulated_config(run).drafts_beside_policy, "its turns left the slots no time"
    assert rules_of(run.config).late_s > 0 and not rules_of(run.config).dense
    assert len(predicted(run, basis_of([run]))) == len(own.steps)


def test_what_a_phase_takes_around_its_servers_work_is_added(runs: Mapping[str, RecordedRun]) -> None:
    """As when states are handed over: 0.7 s of each rollout phase in which no server generates."""

    def longer(step: RecordedStep) -> RecordedStep:
        return replace(step, metrics=replace(step.metrics, rollout_s=step.metrics.rollout_s + 0.7))

    basis, slow = (
        basis_of([r]) for r in (runs["off"], replace(runs["off"], steps=tuple(map(longer, runs["off"].steps))))
    )
    assert 0 <= basis.around_s(runs["off"]) < 0.02
    before, after = (predicted(runs["off-2"], b) for b in (basis, slow))
    assert [a.rollout_s - b.rollout_s for a, b in zip(after, before, strict=True)] == [pytest.approx(0.7)] * 4
