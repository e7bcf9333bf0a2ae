"""`longtail k8s` as a person types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.__main__ import app
from tests.deploy.k8s.trees import ROOT

COMMAND = [sys.executable, "-m", "deploy", "k8s"]


def longtail(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_render_pipes_into_validate_and_a_mistake_ends_with_code_2() -> None:
    rendered = longtail("render", "pocket-demo", "rollout.num_servers=3", "--overlay", "job-kueue", "--run-id", "night")
    assert rendered.returncode == 0 and "name: night" in rendered.stdout, rendered.stderr
    checked = longtail("validate", stdin=rendered.stdout)
    assert checked.returncode == 0 and "no mistakes found" in checked.stdout, checked.stderr
    spoilt = longtail("validate", "-", stdin=rendered.stdout.replace('num-gpus: "0"', 'num-gpus: "1"', 1))
    assert spoilt.returncode == 2
    assert "RayJob/night: spec.rayClusterSpec.headGroupSpec.rayStartParams.num-gpus 1" in spoilt.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["render", "pocket-dmo"], "cannot read configuration 'pocket-dmo'"),
        (["render", "pocket-demo", "--overlay", "jbo"], "--overlay 'jbo' must be one of job, job-http"),
        (["render", "pocket-demo", "--run-id", "My Run"], "--run-id"),
        (["render", "pocket-demo", "placement.mode=local"], "set placement.mode: ray"),
        (["validate", "nowhere"], "nowhere does not exist"),
    ],
)
def test_wrong_input_is_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["k8s", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_tree_is_written_and_found_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    app(["k8s", "render", "pocket-tiny", "--out", str(folder)], standalone_mode=False)
    app(["k8s", "validate", str(folder / "overlays" / "job")], standalone_mode=False)
    printed = capsys.readouterr().out
    assert f"kubectl apply -k {folder / 'overlays' / 'job'}" in printed and "no mistakes found" in printed
