"""`longtail why` about a run that is under way, from another process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy.cluster import run_on_ray
from deploy.resuming import Start
from services.core.errors import StopRequested
from services.core.types import ProgressView
from tests.deploy.tiny_run import make_model_folder, tiny_run
from tests.services.coordinator.world import Recorder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Curious:
    """Asks once, in the middle of the rollouts of step 2; the coordinator goes on meanwhile, and is stopped then."""

    answer: subprocess.CompletedProcess[str] | None = None
    stranger: subprocess.CompletedProcess[str] | None = None

    def watch(self, view: ProgressView) -> None:
        if view.step >= 2 and view.phase == "rollout" and self.answer is None:
            address = ray.get_runtime_context().gcs_address
            self.answer = self._ask("asked", "--address", address, "--stacks")
            self.stranger = self._ask("another", "--address", address)
            raise KeyboardInterrupt

    def _ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy", "why", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(scope="module")
def curious(tmp_path_factory: pytest.TempPathFactory) -> Curious:
    folder = tmp_path_factory.mktemp("run")
    changes: dict[str, dict[str, Any]] = {
        "rollout": {"prompts_per_step": 16, "engine": {"type": "native", "max_running": 4, "max_len": 192}},
        "run": {"dir": str(folder), "steps": 1000, "eval_prompts": 0, "compare_prompts": 0},
    }
    observer, asking = Recorder(), Curious()
    observer.watch = asking.watch
    config = tiny_run(make_model_folder(folder), folder, **changes)
    with pytest.raises(StopRequested):
        run_on_ray(config, observer, start=Start("asked"))
    return asking


def test_roles_leases_versions_and_calls_are_told(curious: Curious) -> None:
    assert curious.answer is not None and curious.answer.returncode == 0, curious.answer
    told = curious.answer.stdout
    for name in ("rollout-0", "rollout-1", "drafter-0", "drafter-1", "policy", "reward", "coordinator"):
        assert f"  {name}: alive, " in told
    assert "of 1000, " in told and "slot 0: " in told and "slot 1: " in told and ", epoch " in told
    assert "its server serves policy version " in told and "last answers:" in told and "s ago" in told
    assert "asked and not answered:" in told or "nobody is asked for anything" in told


def test_stacks_are_told_or_why_not(curious: Curious) -> None:
    assert curious.answer is not None
    told = curious.answer.stdout
    assert told.count("stack of ") == 7
    assert "Thread " in told or "py-spy was refused" in told


def test_a_run_that_is_not_there_is_told_with_those_that_are(curious: Curious) -> None:
    assert curious.stranger is not None and curious.stranger.returncode == 2
    assert "no run another on this Ray; there are asked" in curious.stranger.stderr
