"""The run folder: complete, readable at any moment, never shared by two runs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.core.types import Group, ProgressView, Reward, RunEvent, SlotSpan, StepMetrics
from services.report.records import read_lines, to_json, to_row
from services.report.run_data import load_run
from services.report.run_folder import ENDPOINT_FILE, VALUES_FILE, RunFolder, make_run_id, render_report

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_resolved_config_is_there_before_anything_else_and_loads_back(folder: RunFolder, config: ClusterConfig) -> None:
    loaded = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert ClusterConfig.model_validate(loaded) == config
    assert not (folder.path / "summary.json").exists()


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", "", "x" * 500, "caf\u00e9 run", "-rf"])
def test_run_id_is_a_plain_folder_name(name: str) -> None:
    run_id = make_run_id(name, NOW, "a1b2c3")
    assert Path(run_id).name == run_id and not run_id.startswith((".", "-")) and len(run_id) < 120
    assert run_id.endswith("-20260102-030405-a1b2c3")


def test_a_run_folder_is_never_reused(config: ClusterConfig) -> None:
    first = RunFolder(config, now=lambda: NOW, token=lambda: "same")
    first.event(RunEvent(1.0, "kept", "a", "b"))
    with pytest.raises(ConfigError, match=r"exists: .*run\.name"):
        RunFolder(config, now=lambda: NOW, token=lambda: "same")
    assert len(lines(first.path / "events.jsonl")) == 1


def test_runs_of_one_second_get_folders_of_their_own(config: ClusterConfig) -> None:
    assert len({RunFolder(config, now=lambda: NOW).path for _ in range(5)}) == 5


def test_unwritable_place_is_a_config_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ClusterConfig.model_validate({"run": {"dir": str(tmp_path / "file" / "runs")}})
    with pytest.raises(ConfigError, match=r"run\.dir"):
        RunFolder(config)


def test_rollouts_read_back_equal(folder: RunFolder, groups: list[Group]) -> None:
    groups[0] = replace(groups[0], rewards=(Reward(0.0, False, "verifier timed out"), *groups[0].rewards[1:]))
    folder.rollouts(1, groups)
    rows = pq.read_table(folder.path / "rollouts" / "step_00001.parquet").to_pylist()
    flat = [(g.prompt, r, w) for g in groups for r, w in zip(g.rollouts, g.rewards, strict=True)]
    assert len(rows) == len(flat) == 8
    for row, (prompt, rollout, reward) in zip(rows, flat, strict=True):
        assert (row["prompt"], row["answer"], row["response"]) == (prompt.text, prompt.answer, rollout.text)
        assert (tuple(row["prompt_ids"]), tuple(row["response_ids"])) == (rollout.prompt_ids, rollout.response_ids)
        assert row["rollout_logprobs"] == pytest.approx(rollout.rollout_logprobs, abs=1e-6)
        assert (row["reward"], row["correct"], row["reward_error"]) == (reward.value, reward.correct, reward.error)
        assert (row["seed"], row["server"], row["index"]) == (rollout.seed, rollout.server, rollout.index)
        assert row["finish_reason"] == rollout.finish_reason.value
        assert tuple(row["policy_versions"]) == rollout.policy_versions
        assert tuple(row["acceptance_histogram"]) == rollout.acceptance.histogram
        assert dict(row["steps_by_strategy"]) == rollout.acceptance.steps_by_strategy
        assert (row["started_s"], row["finished_s"]) == (rollout.started_s, rollout.finished_s)
        assert row["response_len"] == len(rollout.response_ids)


def test_rollouts_take_any_text_and_no_rollouts(folder: RunFolder, groups: list[Group]) -> None:
    rollouts = (replace(groups[0].rollouts[0], text="lone \ud800 surrogate \x00"), *groups[0].rollouts[1:])
    folder.rollouts(1, [replace(groups[0], rollouts=rollouts)])
    folder.rollouts(2, [])
    first, second = sorted((folder.path / "rollouts").iterdir())
    assert "surrogate" in pq.read_table(first).to_pylist()[0]["response"]
    assert pq.read_table(second).num_rows == 0
    assert render_report(folder.path).exists()


def test_metrics_lines_tell_steps_from_evaluations(
    folder: RunFolder, metrics: StepMetrics, drive: Callable[..., float]
) -> None:
    drive(folder, steps=2)
    rows = lines(folder.path / "metrics.jsonl")
    assert [r["kind"] for r in rows] == ["evaluation", "step", "step", "evaluation"]
    folder.step(metrics)
    last = lines(folder.path / "metrics.jsonl")[-1]
    assert {k: v for k, v in last.items() if k != "kind"} == json.loads(json.dumps(asdict(metrics)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_stay_valid_json_and_are_named(
    folder: RunFolder, metrics: StepMetrics, value: float
) -> None:
    folder.step(replace(metrics, policy_loss=value, acceptance_length=value))
    text = (folder.path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["policy_loss"] is None and row["not_finite"] == ["acceptance_length", "policy_loss"]
    assert any("policy_loss" in note for note in load_run(folder.path).notes)


def test_appends_from_many_threads_stay_whole_lines(folder: RunFolder) -> None:
    def work(who: int) -> None:
        for i in range(100):
            folder.event(RunEvent(float(i), "k" * 300, str(who), 'line\nbreak \u2028 and "quotes"'))

    threads = [threading.Thread(target=work, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    rows = lines(folder.path / "events.jsonl")
    assert len(rows) == 600
    assert all([r["at_s"] for r in rows if r["subject"] == str(w)] == list(map(float, range(100))) for w in range(6))


def test_every_append_is_on_disk_when_the_call_returns(folder: RunFolder, metrics: StepMetrics) -> None:
    folder.span(SlotSpan("slot 0", "idle", 0.0, 1.0))
    folder.step(metrics)
    assert len(lines(folder.path / "spans.jsonl")) == len(lines(folder.path / "metrics.jsonl")) == 1


def test_a_folder_cut_at_any_byte_still_renders(folder: RunFolder, drive: Callable[..., float]) -> None:
    """A crash can leave a cut last line, in any of the files."""
    drive(folder, steps=2)
    for name in ("metrics.jsonl", "events.jsonl", "spans.jsonl", "strategies.jsonl"):
        path = folder.path / name
        whole = path.read_bytes()
        for keep in (0, 1, len(whole) // 2, len(whole) - 2, len(whole) - 1):
            path.write_bytes(whole[:keep])
            rows, bad = read_lines(path)
            assert len(rows) + bad == len([part for part in whole[:keep].split(b"\n") if part])
            assert "unfinished" in render_report(folder.path).read_text()
        path.write_bytes(whole)


def test_finish_writes_summary_trace_and_report(
    folder: RunFolder, drive: Callable[..., float], summary: dict[str, Any]
) -> None:
    drive(folder)
    folder.finish({**summary, "status": "stopped", "loss": math.nan})
    written = json.loads((folder.path / "summary.json").read_text())
    assert {k: written[k] for k in summary} == summary
    assert written["status"] == "stopped" and written["loss"] is None and written["run_id"] == folder.run_id
    assert json.loads((folder.path / "trace.json").read_text())["traceEvents"]
    assert "stopped" in (folder.path / "report.html").read_text()
    assert not [p for p in folder.path.rglob("*") if p.name.endswith(".tmp")]


def test_finish_may_come_twice_and_late_events_are_kept(folder: RunFolder) -> None:
    """Ctrl-C may arrive while the first finish is under way, and a service may die after it."""
    folder.finish({"status": "finished"})
    folder.event(RunEvent(9.0, "slot_lost", "slot 0", "late"))
    folder.finish({"status": "stopped"})
    assert json.loads((folder.path / "summary.json").read_text())["status"] == "stopped"
    assert "late" in (folder.path / "report.html").read_text()


def test_report_is_redrawn_from_the_folder_alone(
    folder: RunFolder, drive: Callable[..., float], summary: dict[str, Any]
) -> None:
    drive(folder)
    folder.finish(summary)
    report, trace = folder.path / "report.html", folder.path / "trace.json"
    before = report.read_text(), trace.read_text()
    report.unlink()
    trace.unlink()
    moved = folder.path.rename(folder.path.with_name("moved"))
    assert render_report(moved) == moved / "report.html"
    assert ((moved / "report.html").read_text(), (moved / "trace.json").read_text()) == before


def test_report_of_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        render_report(tmp_path)


def test_progress_is_read_whole_from_any_thread(folder: RunFolder) -> None:
    assert folder.latest_progress() is None

    def view(i: int) -> ProgressView:
        return ProgressView("rollout", i, i, i, i, i, float(i), None, None, None, i, i, {"slot 0": str(i)})

    stop, torn = threading.Event(), []

    def read() -> None:
        seen = 0
        while not stop.is_set():
            now = folder.latest_progress()
            if now is not None:
                if now != view(now.step) or now.step < seen:
                    torn.append(now)
                seen = now.step

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(2000):
        folder.progress(view(i))
    stop.set()
    reader.join(timeout=120)
    assert not torn and folder.latest_progress() == view(1999)


def test_to_row_keeps_the_kind_first_and_enums_as_words(metrics: StepMetrics) -> None:
    row = to_row({"a": {"b": math.nan}, "t": (1, 2)}, kind="x")
    assert next(iter(row)) == "kind" and row["not_finite"] == ["a.b"] and json.loads(to_json(row))["t"] == [1, 2]


def test_prometheus_finds_the_endpoint_while_the_run_lasts(config: ClusterConfig) -> None:
    told: list[str] = []
    folder = RunFolder(config, token=lambda: "endpoint", say=told.append)
    folder.endpoint("127.0.0.1", 1001)
    folder.endpoint("fe80::1", 1002)  # of a coordinator that took over elsewhere
    assert json.loads((folder.path / ENDPOINT_FILE).read_text()) == [{"targets": ["[fe80::1]:1002"]}]
    assert told == ["metrics: http://127.0.0.1:1001/metrics", "metrics: http://[fe80::1]:1002/metrics"]
    folder.finish({"status": "stopped"})
    assert not (folder.path / ENDPOINT_FILE).exists()


def test_the_metrics_values_are_kept_whole(folder: RunFolder) -> None:
    state = {"longtail_steps_total": (3.0,), "longtail_load_seconds": (0.5, 1.0, 0.0)}
    folder.values({"longtail_steps_total": (2.0,)})
    folder.values(state)
    kept = json.loads((folder.path / VALUES_FILE).read_text())
    assert kept == {name: list(numbers) for name, numbers in state.items()}
