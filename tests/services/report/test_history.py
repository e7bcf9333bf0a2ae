"""A run folder that is opened again: what it still knows, what is cut, and when it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.load import dump_config
from services.config.resume import FREE_WITHIN, KEPT
from services.config.schema import ClusterConfig
from services.core.checkpoints import MANIFEST, step_folder, whole_checkpoints
from services.core.errors import ConfigError
from services.core.types import EvalResult, Group, RunEvent, SlotSpan, StepMetrics, StrategySpan
from services.report.history import read_steps, superseded
from services.report.run_folder import RunFolder, finished_summary


def named(config: ClusterConfig, run_id: str = "again", **run: object) -> ClusterConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"id": run_id, **run})})


def fill(folder: RunFolder, metrics: StepMetrics, groups: list[Group], steps: int) -> None:
    for step in range(1, steps + 1):
        folder.step(replace(metrics, step=step, at_s=10.0 * step))
        folder.rollouts(step, groups)
        make_checkpoint(folder, step)
    folder.evaluation(EvalResult(0, 1.0, 4, 4, 0.25, 0.25))
    folder.evaluation(EvalResult(steps, 10.0 * steps, 4, 4, 0.5, 0.5))
    folder.event(RunEvent(11.0, "slot_lost", "rollout-0", "killed"))
    folder.span(SlotSpan("slot 0", "rollout", 0.0, 10.0 * steps + 3, "step"))
    folder.strategy(StrategySpan(1.0, 10.0 * steps + 4, "off", "forced", 9, 8.0, 18, 18, 2, 2, slot="slot 0"))


def make_checkpoint(folder: RunFolder, step: int) -> None:
    place = step_folder(folder.checkpoints, step)
    place.mkdir(parents=True)
    (place / MANIFEST).write_text("{}")


def test_steps_are_read_in_order_and_one_that_was_done_again_once(
    config: ClusterConfig, metrics: StepMetrics, groups: list[Group]
) -> None:
    folder = RunFolder(named(config, keep_last=9))
    fill(folder, metrics, groups, 3)
    folder.step(replace(metrics, step=2, at_s=55.0))
    folder.close()
    assert [(m.step, m.at_s) for m in read_steps(folder.path)] == [(1, 10.0), (2, 55.0), (3, 30.0)]
    assert read_steps(folder.path / "nowhere") == ()


def test_a_run_is_cut_back_to_its_checkpoint(config: ClusterConfig, metrics: StepMetrics, groups: list[Group]) -> None:
    config = named(config, keep_last=9)
    first = RunFolder(config)
    assert not first.reopened and first.path.name == "again"
    fill(first, replace(metrics, kl=math.nan), groups, 5)
    with open(first.path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # killed while it wrote
    first.finish({"status": "stopped"})

    again = RunFolder(config)
    assert again.reopened and again.incarnation == 1 and again.recorded_step() == 5
    history = again.rewind(3)
    again.note_start(3)
    assert [m.step for m in history.steps] == [1, 2, 3] and [e.step for e in history.evaluations] == [0]
    assert math.isnan(history.steps[0].kl), "a number that was not finite comes back"
    assert replace(history.steps[1], kl=0.0) == replace(metrics, step=2, at_s=20.0, kl=0.0)
    assert history.events == 1 and history.elapsed_s == 54.0, "the clock goes on after the last sign of life"
    assert len(list((again.path / "rollouts").glob("*.parquet"))) == 3 and again.recorded_step() == 3
    assert [p.name[-1] for p in whole_checkpoints(again.checkpoints)] == ["1", "2", "3"]
    assert not (again.path / "summary.json").exists() and not (again.path / "report.html").exists()
    told = [json.loads(line) for line in (again.path / "strategies.jsonl").read_text().splitlines()]
    assert [(row["strategy"], row["rounds"], row["off_s"]) for row in told] == [("off", 9, None)], "it was run"
    again.step(replace(metrics, step=4))
    rows = [json.loads(line) for line in (again.path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 0, 4], "whole lines, each step once"
    assert [s["after_step"] for s in json.loads((again.path / "run.json").read_text())["starts"]] == [0, 3]
    again.finish({"status": "finished", "steps": 4})


def test_a_step_without_its_rollouts_is_not_recorded(
    config: ClusterConfig, metrics: StepMetrics, groups: list[Group]
) -> None:
    folder = RunFolder(named(config))
    for step in (1, 2, 3):
        folder.step(replace(metrics, step=step))
        if step != 3:
            folder.rollouts(step, groups)
    assert folder.recorded_step() == 2
    folder.rewind(0)
    assert folder.recorded_step() == 0
    folder.close()


def test_a_live_run_is_not_opened_twice(config: ClusterConfig) -> None:
    folder = RunFolder(named(config))
    with pytest.raises(ConfigError, match="run again is being driven by"):
        RunFolder(named(config))
    folder.close()


def test_settings_that_matter_are_named(config: ClusterConfig) -> None:
    RunFolder(named(config)).close()
    other = named(config).model_dump()
    other["policy"]["learning_rate"] = 0.5
    other["rollout"]["sampling"]["temperature"] = 0.7
    other["run"]["steps"] = 99  # may grow
    other["policy"]["threads"] = 7
    changed = ClusterConfig.model_validate(other)
    with pytest.raises(ConfigError) as caught:
        RunFolder(changed)
    told = str(caught.value)
    assert (
        "policy.learning_rate was 0.0001, now 0.5" in told and "rollout.sampling.temperature was 1.0, now 0.7" in told
    )
    assert "threads" not in told and "run.steps" not in told and "another run.id" in told
    longer = named(config, steps=99)
    RunFolder(longer).close()  # the refused one left the folder free, and nothing in it
    assert (config.run.dir / "again" / "config.yaml").read_text() == dump_config(longer)


@pytest.mark.parametrize("path", [*KEPT, *FREE_WITHIN])
def test_the_kept_settings_exist(path: str) -> None:
    tree = ClusterConfig().model_dump()
    for part in path.split("."):
        tree = tree[part]


def test_a_folder_of_something_else_is_left_alone(config: ClusterConfig) -> None:
    place = config.run.dir / "again"
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"no run folder: it has no config\.yaml, but thesis\.txt"):
        RunFolder(named(config))
    (place / "thesis.txt").unlink()
    assert not RunFolder(named(config)).reopened, "a run killed before it wrote its config is a new one"


@pytest.mark.parametrize("run_id", ["", "../up", "a/b", ".hidden", "a b", "x" * 121])
def test_a_run_id_is_a_plain_folder_name(run_id: str) -> None:
    with pytest.raises(ValueError, match="id"):
        ClusterConfig.model_validate({"run": {"id": run_id}})


def test_a_finished_run_is_known_and_may_be_made_longer(config: ClusterConfig) -> None:
    config = named(config, steps=4)
    assert finished_summary(config) is None
    folder = RunFolder(config)
    folder.finish({"status": "finished", "steps": 4})
    found = finished_summary(config)
    assert found is not None and found["run_id"] == "again"
    assert finished_summary(named(config, steps=5)) is None
    RunFolder(config).finish({"status": "stopped", "steps": 4})
    assert finished_summary(config) is None


def test_old_checkpoints_go_as_steps_are_recorded(
    config: ClusterConfig, metrics: StepMetrics, groups: list[Group]
) -> None:
    folder = RunFolder(named(config, keep_last=2, keep_best=1))
    folder.evaluation(EvalResult(2, 1.0, 4, 4, 0.9, 0.9))
    folder.evaluation(EvalResult(4, 1.0, 4, 4, 0.4, 0.4))
    fill(folder, metrics, groups, 6)
    assert [int(p.name[-1]) for p in whole_checkpoints(folder.checkpoints)] == [2, 4, 5, 6], "6 is not recorded yet"
    folder.close()


@given(
    st.sets(st.integers(1, 40)), st.integers(0, 45), st.dictionaries(st.integers(1, 40), st.floats(0, 1)),
    st.integers(1, 4), st.integers(0, 3),
)  # fmt: skip
def test_there_is_always_one_to_go_on_from(
    steps: set[int], recorded: int, rewards: dict[int, float], last: int, best: int
) -> None:
    gone = set(superseded(sorted(steps), recorded, rewards, last, best))
    usable = sorted(s for s in steps if s <= recorded)
    left = steps - gone
    assert set(usable[-last:]) <= left and {s for s in steps if s > recorded} <= left
    judged = sorted((s for s in usable if s in rewards), key=lambda s: -rewards[s])
    assert len(left & set(usable)) <= last + best
    assert all(any(rewards[k] >= rewards[s] for k in left if k in rewards) for s in judged[:1] if best)
