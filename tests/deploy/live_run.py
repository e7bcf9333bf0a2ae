"""A small run with its real services in this process, and the page over it: for tests that look at a run while it
runs, and ask it for something."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from deploy.local import run_local
from services.coordinator.control import ControlRequest
from services.coordinator.coordinator import Coordinator
from services.core.errors import LongtailError, StopRequested
from services.gateway.app import build_app
from services.gateway.settings import Settings
from services.gateway.source import FolderSource
from services.report.run_folder import RunFolder
from tests.deploy.page_process import TOKEN
from tests.deploy.tiny_run import make_model_folder, tiny_run


@dataclass
class LiveRun:
    """Also the ControlChannel to its coordinator."""

    url: str
    folder: RunFolder
    thread: threading.Thread
    coordinator: Coordinator | None = None
    error: LongtailError | None = None

    def send(self, run_id: str, request: ControlRequest) -> str:
        assert self.coordinator is not None and run_id == self.folder.run_id
        return self.coordinator.control.ask(request)


@contextmanager
def live_run(tmp_path: Path, steps: int = 5000) -> Iterator[LiveRun]:
    """Stopped when the block ends, if it has not ended before."""
    runs = tmp_path / "runs"
    config = tiny_run(make_model_folder(tmp_path), runs, run={"dir": str(runs), "steps": steps, "name": "live",
                      "eval_prompts": 4, "eval_every": 4, "compare_prompts": 0})  # fmt: skip
    folder = RunFolder(config)

    def work() -> None:
        try:
            run_local(config, folder, on_start=lambda c: setattr(run, "coordinator", c))
        except LongtailError as error:
            run.error = error

    run = LiveRun("", folder, threading.Thread(target=work, name="live-run"))
    app = build_app(FolderSource(runs), run, Settings(token=TOKEN))
    listening = socket.create_server(("127.0.0.1", 0))
    run.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="live-page")
    serving.start()
    run.thread.start()
    try:
        yield run
    finally:
        if run.coordinator is not None:
            run.coordinator.stop()
        run.thread.join(90)
        server.should_exit = True
        serving.join(120)
    assert not run.thread.is_alive() and not serving.is_alive()
    assert run.error is None or isinstance(run.error, StopRequested), run.error


def steps_done(run: LiveRun) -> int:
    return (run.folder.path / "metrics.jsonl").read_text().count('"kind": "step"')


def wait_for_steps(run: LiveRun, count: int, seconds: float = 120.0) -> None:
    give_up = time.monotonic() + seconds
    while steps_done(run) < count:
        assert time.monotonic() < give_up and run.thread.is_alive(), f"{steps_done(run)} steps, {run.error}"
        time.sleep(0.1)
