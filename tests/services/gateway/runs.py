"""Run folders as a run writes them, and the gateway over them, for the gateway's tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from services.config.schema import ClusterConfig
from services.coordinator.control import Control, ControlRequest
from services.core.errors import ServiceLostError
from services.core.types import ControlState, ProgressView
from services.gateway.app import build_app
from services.gateway.guard import Guard
from services.gateway.settings import Settings
from services.gateway.source import FolderSource
from services.report.run_folder import RunFolder
from tests.services.report.conftest import SUMMARY, drive_run

TOKEN = "a-token-of-this-test-0123456789"


def view(step: int = 3, phase: str = "rollout", **changes: Any) -> ProgressView:
    values = {
        "phase": phase, "step": step, "num_steps": 9, "rollouts_done": 10, "rollouts_total": 64, "rollouts_running": 12,
        "tokens_per_s": 512.5, "acceptance_length": 2.25, "reward_mean": 0.5, "heldout_reward": 0.41,
        "policy_version": step - 1, "drafter_version": 1, "slots": {"slot 0": "rollout", "slot 1": "drafting"},
        "at_s": 40.0, "phase_at_s": 38.0,
    }  # fmt: skip
    return ProgressView(**{**values, **changes})


def make_run(root: Path, name: str, minutes: int = 0, finished: bool = True, steps: int = 3) -> RunFolder:
    """A made-up run, `minutes` younger than the first."""
    config = ClusterConfig.model_validate({"run": {"name": name, "dir": str(root)}})
    started = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC) + timedelta(minutes=minutes)
    folder = RunFolder(config, now=lambda: started, token=lambda: "abc123")
    drive_run(folder, steps=steps)
    if finished:
        folder.finish({**SUMMARY, "steps": steps})
    else:
        folder.progress(view(steps + 1))
    return folder


@dataclass
class Runs:
    """A ControlChannel to a coordinator's real Control, without the run around it."""

    controls: dict[str, Control] = field(default_factory=dict)
    sent: list[tuple[str, ControlRequest]] = field(default_factory=list)

    def add(self, run_id: str) -> Control:
        self.controls[run_id] = Control(("eagle_3_1_4", "off"), ControlState(), checkpoints=True)
        return self.controls[run_id]

    def send(self, run_id: str, request: ControlRequest) -> str:
        self.sent.append((run_id, request))
        if run_id not in self.controls:
            raise ServiceLostError("the run's coordinator", "it is not running")
        return self.controls[run_id].ask(request)


def gateway(root: Path, runs: Runs | None = None, **settings: Any) -> Guard:
    values = {"token": TOKEN, "hosts": ("testserver", "localhost", "127.0.0.1"), **settings}
    return build_app(FolderSource(root), runs, Settings(**values))
