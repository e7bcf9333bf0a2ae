from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.core.errors import DataError
from services.report.rollouts_file import SCHEMA, rollouts_path
from services.simulator.lockstep import Response
from services.simulator.recorded import basis_of
from services.simulator.run_record import FORWARD, RecordedRun, RecordedStep, read_run
from services.speculation.strategy import OFF, draft_strategy
from tests.services.simulator.worlds import known_world, lockstep_cluster, record


def test_tokens_without_a_signal_count_as_the_trainer_treats_them(runs: Mapping[str, RecordedRun]) -> None:
    one, other = (Response(g, 0, "rollout-0", 10, 90, 90, 0.0, 1.0) for g in ("a", "b"))
    step = RecordedStep(runs["off"].steps[0].metrics, (one, other), flat=frozenset({"b"}))
    assert step.tokens(runs["off"].of_flat) == 100, "no drafter learns from states"
    assert step.tokens(runs["chain3"].of_flat) == pytest.approx(100 + 100 * FORWARD)
    keeps = runs["off"].config.policy.model_copy(update={"zero_variance": "keep"})
    kept = replace(runs["off"], config=runs["off"].config.model_copy(update={"policy": keeps}))
    assert step.tokens(kept.of_flat) == 200


def test_groups_whose_rewards_are_alike_are_flat(tmp_path: Path) -> None:
    folder = record(lockstep_cluster(steps=1), known_world(), tmp_path / "run")
    path = rollouts_path(folder / "rollouts", 1)
    rows = pq.read_table(path).to_pylist()
    alike = [{**row, "reward": 1.0} if row["group_id"] == "step00001/0003" else row for row in rows]
    pq.write_table(pa.Table.from_pylist(alike, schema=SCHEMA), path)
    assert read_run(folder).steps[0].flat == {"step00001/0003"}


def test_steps_whose_rollouts_moved_are_left_out(tmp_path: Path, runs: Mapping[str, RecordedRun]) -> None:
    folder = record(lockstep_cluster(), known_world(), tmp_path / "run")
    at_s = runs["off"].steps[1].metrics.at_s - 0.01
    with (folder / "events.jsonl").open("a") as out:
        out.write(f'{{"at_s": {at_s}, "kind": "tail_moved", "subject": "rollout-0", "message": ""}}\n')
        out.write('{"at_s": 0.0, "kind": "drafter_published", "subject": "drafter", "message": ""}\n')
    run = read_run(folder)
    assert [s.disturbed for s in run.steps] == [False, True, False, False]
    assert (basis_of([run]).used, basis_of([run]).seen) == (2, 3)


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


def test_strategies_are_told_by_their_names(runs: Mapping[str, RecordedRun]) -> None:
    assert (runs["off"].mode, runs["chain3"].mode, runs["full-2"].mode) == ("off", "eagle_3_1_4", "adaptive")
    assert runs["off"].strategy == OFF and runs["full-2"].strategy is None
    selector = runs["chain3"].config.speculation.strategies[0]
    assert runs["chain3"].strategy == draft_strategy(selector)
