"""`longtail explain`: on runs that are over, go on or were killed, and on folders that do not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.explanation import as_row, explain, lines, read
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.core.types import StrategySpan
from services.report.run_folder import RunFolder
from tests.services.report.conftest import SUMMARY, drive_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = ClusterConfig.model_validate({"run": {"name": "demo", "id": "demo", "dir": str(tmp_path)}})
    made = RunFolder(config)
    drive_run(made, steps=4)
    return made


def test_a_run_that_goes_on_is_explained_and_a_finished_one(folder: RunFolder) -> None:
    text = "\n".join(lines(read(folder.path, None)))
    assert "run demo, not finished" in text and "step 4, in order of time:" in text
    assert "With 17–32 requests running at a server, off ran (100\u00a0% of the rounds)" in text
    first = next(line for line in text.splitlines() if "32 to 17" in line)
    assert "cheapest per token" in first and " off " in first
    folder.finish(dict(SUMMARY))
    assert "run demo, finished" in next(iter(lines(read(folder.path, None))))


def test_the_tables_agree_with_the_file(folder: RunFolder) -> None:
    row = as_row(read(folder.path, 2))
    kept = [json.loads(line) for line in (folder.path / "strategies.jsonl").read_text().splitlines()]
    assert [s["rounds"] for s in row["spans"]] == [s["rounds"] for s in kept if s["label"] == "step 2"]
    assert sum(b["rounds"] for b in row["buckets"]) == sum(s["rounds"] for s in kept)
    assert row["gain"] == pytest.approx(sum(s["off_s"] for s in kept) / sum(s["rounds_s"] for s in kept))
    one = row["spans"][0]
    assert one["expected_off"] == pytest.approx(one["tokens"] / one["off_s"])
    assert [s["step"] for s in row["steps"]] == [1, 2, 3, 4] and row["steps"][0]["predicted_gain"] is None


def test_a_killed_run_is_explained_up_to_its_last_whole_line(folder: RunFolder) -> None:
    path = folder.path / "strategies.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 40])
    assert len(read(folder.path, None).spans) == whole.count(b"\n") - 1


def test_before_the_first_step_the_evaluation_is_told(tmp_path: Path) -> None:
    folder = RunFolder(ClusterConfig.model_validate({"run": {"id": "early", "dir": str(tmp_path)}}))
    with pytest.raises(ConfigError, match="no rounds yet"):
        read(folder.path, None)
    folder.strategy(StrategySpan(0.0, 1.0, "off", "forced", 3, 1.0, 6, 6, 2, 2, slot="slot 0", label="evaluation 0"))
    text = "\n".join(lines(read(folder.path, None)))
    assert "phases before the first step" in text and "evaluation 0, in order of time" in text and "unknown" in text


def test_folders_that_do_not_know_are_refused_with_a_remedy(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        read(tmp_path, None)
    with pytest.raises(ConfigError, match="no rounds of step 9: it has step 1 to step 4"):
        read(folder.path, 9)
    (folder.path / "strategies.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"older Longtail.*--resume"):
        read(folder.path, None)


def test_json_is_one_line(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    explain(folder.path, None, as_json=True)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and json.loads(printed)["phase"] == "step 4"
