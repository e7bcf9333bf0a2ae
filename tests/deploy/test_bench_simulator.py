from __future__ import annotations

from pathlib import Path

import pytest

from deploy.bench_simulator import by_position, drift_of, measure, predict, run_bench, seconds_of
from services.config.speculation import AdaptiveSelector, eagle_chain
from services.core.types import AcceptanceStats, FinishReason, Rollout
from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.round import RoundView
from services.speculation.strategy import OFF
from tests.deploy.tiny_run import make_model_folder, tiny_run
from tests.services.coordinator.fakes import SAMPLING


def rollout_with(stats: AcceptanceStats) -> Rollout:
    stop = FinishReason.STOP
    return Rollout("g", "p", 0, 0, (1,), (2,), (0.0,), "", stop, SAMPLING, (0,), (0,), stats)


def test_acceptance_by_position_is_read_from_histograms() -> None:
    """Of ten verify steps four accepted nothing, three one draft, three two."""
    parts = [rollout_with(AcceptanceStats((4, 1), 10)), rollout_with(AcceptanceStats((0, 2, 3), 10))]
    assert by_position(parts) == (pytest.approx(0.6), pytest.approx(0.5))


def test_a_run_is_simulated_with_its_own_lengths(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path)
    run = measure(config, "static", 2)
    chain = by_position(run.rollouts)
    predicted = predict(run, run, CostTable.typical(), chain)
    assert [m.response_tokens for m in predicted] == [m.response_tokens for m in run.steps]
    assert [m.num_rollouts for m in predicted] == [m.num_rollouts for m in run.steps]
    assert predicted[0].acceptance_length == pytest.approx(run.steps[0].acceptance_length, rel=0.15)
    assert seconds_of(run).policy_token > 0
    ratios = [other.policy_s / real.policy_s for other, real in zip(predicted, run.steps, strict=True)]
    assert min(ratios) < 1.001 and max(ratios) > 0.999, "the median step's rate was taken for all"


def test_the_bench_compares_every_step_of_every_run(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path, run={"steps": 1})
    config = config.model_copy(update={"drafter": config.drafter.model_copy(update={"states": "engine"})})
    chains = AdaptiveSelector(strategies=(eagle_chain(1), eagle_chain(2)), calibrate_s=0.0)
    config = config.model_copy(update={"speculation": config.speculation.model_copy(update={"selector": chains})})
    found = run_bench(config, (2,), 1.0, lambda line: None)
    assert [(r["mode"], r["servers"]) for r in found["rows"]] == [(mode, 2) for mode in ("off", "static", "full")]
    assert all(r["rollout_s"] > 0 < r["rollout_predicted_s"] for r in found["rows"])
    assert found["rollout_error_worst"] >= found["rollout_error_median"] >= 0
    assert [(r["mode"], r["steps"]) for r in found["runs"]] == [(mode, 1) for mode in ("off", "static", "full")]
    assert found["cost_drift"] >= 0


def test_drift_is_how_far_the_machine_moved_between_two_looks() -> None:
    def look(factor: float) -> list[CostPoint]:
        views = [RoundView(running, running * context) for running in (1, 4, 16) for context in (50, 500)]
        real = CostTable.typical()
        return [CostPoint(OFF, v, factor * real.seconds(OFF, v).total) for v in views]

    assert drift_of([look(1.0), look(1.2), look(1.08)]) == pytest.approx(0.2, abs=0.01)
    assert drift_of([look(1.0), look(1.0)]) == pytest.approx(0.0, abs=1e-6)
