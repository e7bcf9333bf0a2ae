"""A world whose costs are known writes run folders; what is read from them must be those costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from services.config.schema import ClusterConfig
from services.core.errors import DataError
from services.simulator.lockstep import Response
from services.simulator.recorded import basis_of, check_alike, seconds_of
from services.simulator.run_record import RecordedRun, read_run
from services.speculation.cost_table import CostTable
from services.speculation.round import RoundView
from services.speculation.strategy import OFF
from tests.services.simulator.worlds import known_world, lockstep_cluster, record


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
    seconds = found.seconds_for(runs["off"])
    assert seconds.policy_step == pytest.approx(given.seconds.policy_step, rel=0.1)
    assert seconds.policy_token == pytest.approx(given.seconds.policy_token, rel=0.1)
    assert seconds.publish == pytest.approx(given.seconds.publish + given.seconds.load, rel=0.05)
    assert found.prefill["off"] == pytest.approx(given.prefill_rate, rel=0.6), "20 ms among seconds"


def test_a_slow_moment_of_almost_full_batches_does_not_make_full_ones_dear(runs: Mapping[str, RecordedRun]) -> None:
    """Sixteen requests go on for 100 rounds of 10 ms; the first rounds of fifteen take 60 ms, all later ones 10."""
    step = runs["off"].steps[1]
    ends = [100, *range(110, 410, 20)]
    times = [1.0 if n == 100 else 1.6 + (n - 110) * 0.01 for n in ends]
    own = tuple(Response(f"g/{n}", 0, "rollout-0", 10, n, n, 0.0, t) for n, t in zip(ends, times, strict=True))
    basis = basis_of([replace(runs["off"], steps=(replace(step, responses=own),))])
    full = basis.table.seconds(OFF, RoundView(16, 16 * 60)).total
    assert full < 0.015


def test_steps_that_were_slow_by_chance_count_as_they_took(runs: Mapping[str, RecordedRun]) -> None:
    """Processors change their pace: every second step took twice as long. What is predicted are means."""
    run, spoilt = runs["off"], []
    for step in run.steps:
        times = 1 + len(spoilt) % 2
        slow = {name: times * getattr(step.metrics, name) for name in ("policy_s", "publish_s", "reward_s")}
        spoilt.append(replace(step, metrics=replace(step.metrics, **slow)))
    other = replace(run, steps=tuple(spoilt))
    seconds = seconds_of([other])
    tokens = mean(step.tokens(other.of_flat) for step in other.counted)
    took = {name: mean(getattr(s.metrics, name) for s in other.counted) for name in slow}
    assert seconds.policy_step + seconds.policy_token * tokens == pytest.approx(took["policy_s"])
    assert (seconds.publish, seconds.reward) == (pytest.approx(took["publish_s"]), pytest.approx(took["reward_s"]))


# ---------------------------------------------------------------------------- refusals


def test_a_run_that_chose_its_strategies_has_no_one_cost(runs: Mapping[str, RecordedRun]) -> None:
    with pytest.raises(DataError, match=r"full-2 chose its strategies \(adaptive\).*give it to --runs.*off or static"):
        basis_of([runs["off"], runs["full-2"]])


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


def test_the_policy_s_seconds_are_of_runs_that_train_it_in_the_same_place(runs: Mapping[str, RecordedRun]) -> None:
    """What rounds cost is of all; two workers train in half the time."""

    def placed(name: str, workers: int, times: float) -> RecordedRun:
        tree = runs[name].config.model_dump()
        tree["placement"] |= {"policy": "colocated", "policy_workers": workers}
        tree["model"]["path"] = f"models/{workers}"
        steps = [replace(s, metrics=replace(s.metrics, policy_s=times * s.metrics.policy_s)) for s in runs[name].steps]
        return replace(runs[name], name="other", config=ClusterConfig.model_validate(tree), steps=tuple(steps))

    one, two = placed("off", 1, 1.0), placed("off", 2, 0.5)
    basis = basis_of([one, two])
    check_alike([one, two])
    for part in ("policy_step", "policy_token"):
        first, second = (getattr(basis.seconds_for(placed("chain3", n, 1.0)), part) for n in (1, 2))
        assert second == pytest.approx(first / 2, rel=1e-6)
    with pytest.raises(DataError, match="trains its policy colocated in 4 workers, as no run of --from does: name one"):
        basis.seconds_for(placed("off", 4, 1.0))


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
