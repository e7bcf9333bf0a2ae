"""The command line as a person meets it: a fresh process, its exit code, what it says and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.config.load import load_config
from tests.deploy.tiny_run import make_model_folder

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def processes_marked(mark: str) -> list[str]:
    """Processes that were started, at any depth, with `mark` in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                found.append((environ.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it ended while we looked
    return found


def longtail(*args: str, cwd: Path, timeout_s: float = 300) -> Outcome:
    """Run the command in `cwd`; whatever it did, no process of it may be left."""
    mark = f"LONGTAIL_TEST_MARK={uuid.uuid4()}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", mark.partition("=")[0]: mark.partition("=")[2]}
    run = [sys.executable, "-m", "deploy", *args]
    done = subprocess.run(run, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert processes_marked(mark) == []
    return Outcome(done.returncode, done.stdout, done.stderr)


def refused(*args: str, cwd: Path) -> str:
    """The message of a command that must end with exit code 2, no traceback, and nothing left in `cwd`."""
    before = sorted(cwd.iterdir())
    done = longtail(*args, cwd=cwd)
    assert done.code == 2, done.err
    assert done.err.startswith("error: ") and "Traceback" not in done.err
    assert sorted(cwd.iterdir()) == before, "a refused command must not start a run"
    return done.err


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An override that names a model folder of random weights."""
    return f"model.path={make_model_folder(tmp_path_factory.mktemp('model'))}"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["rollout.groupsize=4"], "unknown key rollout.groupsize; did you mean rollout.group_size?"),
        (["rollout.group_size=four"], "rollout.group_size = 'four' must be a valid integer"),
        (["rollout.sampling.max_tokens=9000"], "raise max_len to"),
        (["speculation.acceptance=threshold"], "speculation.allow_lossy: true"),
        (["rollout.group_size"], "neither key=value"),
        (["model.path=nowhere"], "no model at nowhere"),
    ],
)
def test_a_bad_configuration_starts_nothing(tmp_path: Path, settings: list[str], told: str) -> None:
    assert told in refused("train", "pocket-tiny", *settings, cwd=tmp_path)


def test_an_unknown_preset_lists_those_that_ship(tmp_path: Path) -> None:
    told = refused("train", "pocket-tinny", cwd=tmp_path)
    assert "pocket-demo, pocket-learn, pocket-spot, pocket-tiny" in told


def test_a_bad_prompt_set_starts_nothing(tmp_path: Path, model: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"prompt": "1 + 1=", "answer": "2"}\n{"prompt": null, "answer": "3"}\n{"answer"\n')
    source = f"data.source={{type: file, path: {file}}}"
    told = refused("train", "pocket-tiny", model, source, cwd=tmp_path)
    assert "line 2: prompt is null" in told and "line 3: " in told


def test_data_check_names_line_and_reason(tmp_path: Path, model: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"prompt": "1 + 1=", "answer": "2"}\n{"prompt": "", "answer": "3"}\n')
    strict = longtail("data", "check", "--set", model, str(file), cwd=tmp_path)
    assert strict.code == 2
    assert f"{file}:2: prompt is empty" in strict.out and "2 rows, 1 usable, 1 bad" in strict.out
    assert longtail("data", "check", "--set", model, str(file), "--mode", "skip", cwd=tmp_path).code == 0
    assert longtail("data", "check", "--set", model, str(file), "--mode", "maybe", cwd=tmp_path).code == 2
    assert "missing.jsonl is not a file" in refused("data", "check", "--set", model, "missing.jsonl", cwd=tmp_path)


def test_data_check_passes_a_good_file(tmp_path: Path, model: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"prompt": "1 + 1=", "answer": "2"}\n')
    done = longtail("data", "check", "--set", model, str(file), cwd=tmp_path)
    assert done.code == 0, done.err
    assert "1 rows, 1 usable, 0 bad" in done.out


def test_config_show_prints_what_would_run(tmp_path: Path) -> None:
    done = longtail("config", "show", "pocket-tiny", "run.steps=7", cwd=tmp_path)
    assert done.code == 0, done.err
    shown = tmp_path / "shown.yaml"
    shown.write_text(done.out)
    expected = load_config(ROOT / "deploy/presets/pocket-tiny.yaml", overrides=["run.steps=7"])
    assert load_config(shown) == expected


def test_report_of_something_else(tmp_path: Path) -> None:
    assert "is no run folder" in refused("report", str(tmp_path), cwd=tmp_path)


def test_help_names_every_command(tmp_path: Path) -> None:
    done = longtail("--help", cwd=tmp_path)
    assert done.code == 0
    for command in ("train", "warmup", "grow", "data", "bench", "report", "config", "version"):
        assert f"\n  {command} " in done.out


def test_a_wrong_command_line_exits_with_2(tmp_path: Path) -> None:
    assert longtail("train", cwd=tmp_path).code == 2
    assert longtail("trian", cwd=tmp_path).code == 2


def test_version(tmp_path: Path) -> None:
    done = longtail("version", cwd=tmp_path)
    assert done.code == 0 and done.out.startswith("longtail ")
