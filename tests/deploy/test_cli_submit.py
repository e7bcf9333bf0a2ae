"""Decisions of `longtail submit` that need no cluster; tests/e2e/test_submit.py has one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deploy.cli_shared import pairs_of
from deploy.cli_submit import JobFailedError, Submission, _judge, entry_of, lost_with_the_head, submit
from deploy.jobs import Outcome, bounded, connect
from services.core.errors import ConfigError
from tests.services.coordinator.world import tiny_config


def test_only_a_job_that_went_with_the_head_is_submitted_again() -> None:
    """Pitfall 70: a mistake is not repeated."""
    gone = Outcome("FAILED", None, "supervisor died")
    assert lost_with_the_head(None, was_lost=False) and lost_with_the_head(gone, was_lost=True)
    assert not lost_with_the_head(gone, was_lost=False)
    for code in (0, 1, 2, 130):
        assert not lost_with_the_head(Outcome("FAILED", code, "exit"), was_lost=True)
    assert not lost_with_the_head(Outcome("SUCCEEDED", 0, ""), was_lost=True)
    assert not lost_with_the_head(Outcome("STOPPED", None, ""), was_lost=True)


@pytest.mark.parametrize(
    ("ended", "code", "words"),
    [
        (Outcome("FAILED", 2, "exit code 2"), 2, "job j failed: exit code 2"),
        (Outcome("FAILED", None, "lost"), 1, "job j failed: lost"),
        (Outcome("STOPPED", None, ""), 130, "job j was stopped"),
        (None, 1, "does not know job j any more"),
    ],
)
def test_the_exit_code_is_the_jobs(ended: Outcome | None, code: int, words: str) -> None:
    with pytest.raises(JobFailedError, match=words) as raised:
        _judge(ended, "j")
    assert raised.value.exit_code == code


def test_a_checkout_that_is_sent_is_what_runs(tmp_path: Path) -> None:
    arguments = ["mine.yaml", "run.dir=/data/a b"]
    rest = "train mine.yaml 'run.dir=/data/a b' placement.address=auto run.id=r1 --quiet"
    assert entry_of(Submission(arguments, tmp_path), "r1") == f"longtail {rest}"
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__main__.py").touch()
    assert entry_of(Submission(arguments, tmp_path), "r1") == f"python -m deploy {rest}"
    own = Submission(["p", "placement.address=10.0.0.1:6379"], tmp_path)
    assert "auto" not in entry_of(own, "r1")


def test_a_run_folder_inside_the_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir runs would lie in the job's temporary folder"):
        submit(tiny_config(run={"dir": "runs"}), Submission(["pocket-tiny"], Path()))


def test_nobody_at_the_address_is_told() -> None:
    with pytest.raises(ConfigError, match=r"no Ray dashboard answers at http://127\.0\.0\.1:1"):
        connect("http://127.0.0.1:1")


def test_words_for_the_environment() -> None:
    assert pairs_of(["A=1", "B=x=y"]) == {"A": "1", "B": "x=y"}
    with pytest.raises(ConfigError, match="'A' is not NAME=VALUE"):
        pairs_of(["A"])


def test_a_dashboard_that_never_answers_does_not_hold_the_command() -> None:
    with pytest.raises(TimeoutError):
        bounded(lambda: time.sleep(5), 0.1)
    assert bounded(lambda: 3, 5.0) == 3
    with pytest.raises(RuntimeError, match="refused"):
        bounded(_refuse, 5.0)


def _refuse() -> None:
    raise RuntimeError("refused")
