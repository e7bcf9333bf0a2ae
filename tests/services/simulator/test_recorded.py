"""A world whose costs are known writes run folders; what is read from them must be those costs."""

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
from services.simulator.lockstep import Response
from services.simulator.recorded import basis_of, check_alike, cost_error, rules_of, seconds_of
from services.simulator.recorded_acceptance import acceptance_of
from services.simulator.rerun import predicted, prompts_of, simulated_config, with_drafter
from services.simulator.run_record import FORWARD, RecordedRun, RecordedStep, read_run
from services.simulator.world import build_inputs
from services.speculation.cost_table import CostTable
from services.speculation.round import RoundView
from services.speculation.strategy import OFF, draft_strategy
from tests.services.simulator.worlds import CHAINS, chain_of, known_world, lockstep_cluster, record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, RecordedRun]:
    folder = tmp_path_factory.mktemp("runs")
    wanted = {
        "off": lockstep_cluster(), "chain1": chain_of(1), "chain3": chain_of(3),
        "off-2": lockstep_cluster(2), "chain3-2": chain_of(3, 2), "full-2": lockstep_cluster(2, "full"),
    }  # fmt: skip
    return {name: read_run(record(wanted[name], known_world(), folder / name)) for name in wanted}


def on_gpus(config: ClusterConfig, **placement: Any) -> ClusterConfig:
    tree = config.model_dump()
    tree["placement"] |= {"gpus_per_slot": 1.0, "policy_gpus": 1.0, **placement}
    tree["rollout"]["engine"] = {"type": "sglang", "max_running": 32, "release_memory": True}
    return ClusterConfig.model_validate(tree)


def means(steps: list[StepMetrics]) -> tuple[float, float]:
    return mean(m.rollout_s for m in steps), mean(m.rollout_s + m.reward_s + m.policy_s + m.publish_s for m in steps)


def test_the_costs_of_a_known_world_are_found_again(runs: Mapping[str, RecordedRun]) -> None:
    basis = basis_of([runs["off"], runs["chain1"], runs["chain3"]])
    real = CostTable.typical()
    assert (basis.used, basis.seen) == (9, 9), "three servers' steps of each, without the first"
    assert {p.strategy.name for p in basis.points} == {"off", "eagle_1_1_2", "eagle_3_1_4"}
    assert min(p.view.running for p in basis.points) <= 2 and max(p.view.running for p in basis.points) >= 28
    for point in basis.points:
        wanted = real.seconds(point.strategy, point.view).total
        assert point.total == pytest.approx(wanted, rel=0.08), "within eight rounds a server may wait for an order"
        assert basis.table.seconds(point.strategy, point.view).total == pytest.approx(wanted, rel=0.03)


def test_the_seconds_of_everything_else_are_found_again(runs: Mapping[str, RecordedRun]) -> None:
    given, found = known_world(), basis_of([runs["off"]])
    assert found.seconds.policy_step == pytest.approx(given.seconds.policy_step, rel=0.1)
    assert found.seconds.policy_token == pytest.approx(given.seconds.policy_token, rel=0.1)
    assert found.seconds.publish == pytest.approx(given.seconds.publish + given.seconds.load, rel=0.05)
    assert found.prefill["off"] == pytest.approx(given.prefill_rate, rel=0.6), "20 ms among seconds"


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


@pytest.mark.parametrize("name", ["off-2", "chain3-2", "full-2", "chain3"])
def test_other_runs_of_the_world_are_predicted(runs: Mapping[str, RecordedRun], name: str) -> None:
    """Other numbers of servers, and a selector that chooses among strategies."""
    basis = basis_of([runs["off"], runs["chain1"], runs["chain3"]])
    run = runs[name]
    real, found = [s.metrics for s in run.steps], predicted(run, basis)
    assert [m.response_tokens for m in found] == [m.response_tokens for m in real]
    assert means(found) == (pytest.approx(means(real)[0], rel=0.05), pytest.approx(means(real)[1], rel=0.05))


def test_ends_that_are_seen_late_do_no_harm(tmp_path: Path) -> None:
    """As SGLang's are: by up to a tenth of a second, a dozen rounds."""
    assumed, rng = replace(known_world(), dense=False), random.Random(0)
    run = read_run(record(on_gpus(lockstep_cluster()), assumed, tmp_path / "one"))
    other = read_run(record(on_gpus(lockstep_cluster(2)), assumed, tmp_path / "two"))

    def late(step: RecordedStep) -> RecordedStep:
        seen = (replace(r, finished_s=r.finished_s + rng.uniform(0, 0.1)) for r in step.responses)
        return replace(step, responses=tuple(seen))

    seen = replace(run, steps=tuple(map(late, run.steps)))
    assert rules_of(run.config).late_s == 0.1 and basis_of([seen]).used == 3
    found = predicted(other, basis_of([seen]))
    assert means(found)[0] == pytest.approx(means([s.metrics for s in other.steps])[0], rel=0.05)


def test_a_slow_moment_of_almost_full_batches_does_not_make_full_ones_dear(runs: Mapping[str, RecordedRun]) -> None:
    """Sixteen requests go on for 100 rounds of 10 ms; the first rounds of fifteen take 60 ms, all later ones 10."""
    step = runs["off"].steps[1]
    ends = [100, *range(110, 410, 20)]
    times = [1.0 if n == 100 else 1.6 + (n - 110) * 0.01 for n in ends]
    own = tuple(Response(f"g/{n}", 0, "rollout-0", 10, n, n, 0.0, t) for n, t in zip(ends, times, strict=True))
    basis = basis_of([replace(runs["off"], steps=(replace(step, responses=own),))])
    full = basis.table.seconds(OFF, RoundView(16, 16 * 60)).total
    assert full < 0.015


def test_a_wrong_table_predicts_wrongly(runs: Mapping[str, RecordedRun]) -> None:
    basis = basis_of([runs["off"]])
    slow = CostTable({n: 1.2 * v for n, v in basis.table.terms.items()}, basis.table.knots, 0.0)
    found = predicted(runs["off-2"], replace(basis, table=slow))
    assert means(found)[0] > 1.1 * means([s.metrics for s in runs["off-2"].steps])[0]
    assert cost_error(runs["off-2"], replace(basis, table=slow)) == pytest.approx(0.2, abs=0.03)
    assert cost_error(runs["off-2"], basis) == pytest.approx(0.0, abs=0.03)
    assert cost_error(runs["full-2"], basis) is None


def test_acceptance_is_read_by_position(runs: Mapping[str, RecordedRun]) -> None:
    assert acceptance_of(runs["off"]) == ()
    run = with_rounds(runs["chain3"], {"eagle_3_1_4": 100}, (40, 24, 18, 18))
    assert acceptance_of(run) == (pytest.approx(0.6), pytest.approx(0.6), pytest.approx(0.5))


def test_a_shallow_chain_says_nothing_about_deep_positions(runs: Mapping[str, RecordedRun]) -> None:
    """50 rounds with one draft each and 50 with three, all with a first draft accepted 0.8 of the time."""
    run = with_rounds(runs["full-2"], {"eagle_1_1_2": 50, "eagle_3_1_4": 50}, (20, 60, 10, 10))
    assert acceptance_of(run) == (pytest.approx(0.8), pytest.approx(0.5), pytest.approx(0.5))


def with_rounds(run: RecordedRun, steps: dict[str, int], histogram: tuple[int, ...]) -> RecordedRun:
    response = replace(run.steps[0].responses[0], histogram=histogram, steps_by_strategy=steps)
    return replace(run, steps=(replace(run.steps[0], responses=(response,)),))


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


def test_tokens_without_a_signal_count_as_the_trainer_treats_them(runs: Mapping[str, RecordedRun]) -> None:
    one, other = (Response(g, 0, "rollout-0", 10, 90, 90, 0.0, 1.0) for g in ("a", "b"))
    step = RecordedStep(runs["off"].steps[0].metrics, (one, other), flat=frozenset({"b"}))
    assert step.tokens(runs["off"].of_flat) == 100, "no drafter learns from states"
    assert step.tokens(runs["chain3"].of_flat) == pytest.approx(100 + 100 * FORWARD)
    keeps = runs["off"].config.policy.model_copy(update={"zero_variance": "keep"})
    kept = replace(runs["off"], config=runs["off"].config.model_copy(update={"policy": keeps}))
    assert step.tokens(kept.of_flat) == 200


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


def test_steps_whose_rollouts_moved_are_left_out(tmp_path: Path, runs: Mapping[str, RecordedRun]) -> None:
    folder = record(lockstep_cluster(), known_world(), tmp_path / "run")
    at_s = runs["off"].steps[1].metrics.at_s - 0.01
    with (folder / "events.jsonl").open("a") as out:
        out.write(f'{{"at_s": {at_s}, "kind": "tail_moved", "subject": "rollout-0", "message": ""}}\n')
        out.write('{"at_s": 0.0, "kind": "drafter_published", "subject": "drafter", "message": ""}\n')
    run = read_run(folder)
    assert [s.disturbed for s in run.steps] == [False, True, False, False]
    assert (basis_of([run]).used, basis_of([run]).seen) == (2, 3)


# ---------------------------------------------------------------------------- refusals


def test_a_run_that_chose_its_strategies_has_no_one_cost(runs: Mapping[str, RecordedRun]) -> None:
    with pytest.raises(DataError, match=r"full-2 chose its strategies \(adaptive\).*give it to --runs.*off or static"):
        basis_of([runs["off"], runs["full-2"]])


def test_a_folder_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run folder"):
        read_run(tmp_path)
    folder = record(lockstep_cluster(steps=1), known_world(), tmp_path / "run")
    (folder / "rollouts" / "step_00001.parquet").unlink()
    with pytest.raises(DataError, match=r"has no step with its rollouts.*copy the whole run folder"):
        read_run(folder)


def test_a_gap_between_steps_is_refused(tmp_path: Path) -> None:
    folder = record(lockstep_cluster(steps=3), known_world(), tmp_path / "run")
    (folder / "rollouts" / "step_00002.parquet").unlink()
    with pytest.raises(DataError, match="lacks steps in between: it has 1, 3"):
        read_run(folder)


def test_runs_of_another_model_or_engine_are_refused(runs: Mapping[str, RecordedRun]) -> None:
    tree = runs["off"].config.model_dump()
    tree["model"]["dtype"] = "bfloat16"
    other = replace(runs["off"], name="other", config=ClusterConfig.model_validate(tree))
    with pytest.raises(
        DataError, match=r"other has model\.dtype bfloat16, .*off has float32.*name runs that differ in"
    ):
        check_alike([runs["off"], other])
    tree = runs["off"].config.model_dump()
    tree["rollout"]["engine"] |= {"threads": 2, "max_running": 64}
    threads = replace(runs["off"], name="other", config=ClusterConfig.model_validate(tree))
    with pytest.raises(DataError, match=r"other has rollout\.engine\.threads 2"):
        check_alike([runs["off"], threads])
    check_alike(list(runs.values()))


def test_rollouts_that_waited_for_room_tell_nothing(tmp_path: Path) -> None:
    small = {"type": "native", "max_running": 8, "max_len": 4096}
    run = read_run(record(lockstep_cluster(engine=small), known_world(), tmp_path / "run"))
    with pytest.raises(DataError, match="max_running of at least 32"):
        basis_of([run])


def test_rollouts_that_are_too_short_tell_nothing(runs: Mapping[str, RecordedRun]) -> None:
    step = runs["off"].steps[1]
    alike = tuple(replace(r, tokens=9, rounds=9, finished_s=r.started_s + 1.0) for r in step.responses)
    with pytest.raises(DataError, match="too short or too alike"):
        basis_of([replace(runs["off"], steps=(replace(step, responses=alike),))])


def test_drafts_that_were_looked_up_are_refused(runs: Mapping[str, RecordedRun]) -> None:
    suffix = {"drafter": "suffix", "depth": 4, "num_draft_tokens": 5}
    tree = runs["full-2"].config.model_dump()
    tree["speculation"]["selector"]["strategies"] = [*CHAINS, suffix]
    run = replace(runs["full-2"], config=ClusterConfig.model_validate(tree))
    few = with_rounds(run, {"eagle_1_1_2": 990, "suffix_4_1_5": 10}, (200, 800))
    assert acceptance_of(few)[0] == pytest.approx(800 / 990, abs=1e-6)
    with pytest.raises(DataError, match=r"looking up in 20 of 100 verify steps.*leave suffix, hybrid and ngram out"):
        acceptance_of(with_rounds(run, {"eagle_1_1_2": 80, "suffix_4_1_5": 20}, (20, 80)))


def test_further_prompts_of_dynamic_sampling_are_refused(runs: Mapping[str, RecordedRun]) -> None:
    step = runs["off"].steps[0]
    more = replace(step.responses[0], group_id="step00001/0008")
    run = replace(runs["off"], steps=(replace(step, responses=(*step.responses, more)),))
    with pytest.raises(DataError, match=r"has 9 groups in step 1 and not .* \(8\).*dynamic_sampling"):
        prompts_of(run)


def test_a_colocated_policy_is_simulated_on_gpus_of_its_own(runs: Mapping[str, RecordedRun]) -> None:
    shared = on_gpus(runs["off"].config, policy="colocated", gpus_per_slot=0.6, policy_gpus=0.4)
    run = replace(runs["off"], config=shared)
    assert not simulated_config(run).placement.colocated
    assert rules_of(run.config).late_s > 0 and not rules_of(run.config).dense
    assert len(predicted(run, basis_of([runs["off"]]))) == 4


def test_strategies_are_told_by_their_names(runs: Mapping[str, RecordedRun]) -> None:
    assert (runs["off"].mode, runs["chain3"].mode, runs["full-2"].mode) == ("off", "eagle_3_1_4", "adaptive")
    assert runs["off"].strategy == OFF and runs["full-2"].strategy is None
    selector = runs["chain3"].config.speculation.strategies[0]
    assert runs["chain3"].strategy == draft_strategy(selector)
