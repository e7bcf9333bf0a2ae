"""The live page on Ray Serve: the same application, inside the Ray of the runs."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from pydantic import ValidationError
from ray import serve

from deploy.naming import NAMESPACE, actor_name
from deploy.processes import descendants, end_processes
from deploy.serve import live
from services.coordinator.control import Control, ControlRequest
from services.core.types import ControlState
from tests.deploy.page_process import TOKEN
from tests.services.gateway.runs import make_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


class Coordinator:
    """What a run's coordinator actor has for control, without the run."""

    def __init__(self) -> None:
        self._control = Control(("off",), ControlState(), checkpoints=False)

    def control(self, request: ControlRequest) -> str:
        return self._control.ask(request)

    def state(self) -> ControlState:
        return self._control.state


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve") / "runs"
    make_run(root, "first")
    make_run(root, "second", minutes=1)
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["LONGTAIL_TOKEN"] = TOKEN
    before = descendants()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, namespace="other",
             log_to_driver=False)  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(live({"runs_dir": str(root)}), name="live", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        started = [p for p in descendants() if p not in before]
        ray.shutdown()
        end_processes(started)
        del os.environ["LONGTAIL_TOKEN"]


def ask(url: str, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_it_serves_the_page_and_controls_runs_by_their_actors(url: str, root: Path) -> None:
    status, page = ask(f"{url}/")
    assert status == 200 and b"Longtail" in page and ask(f"{url}/assets/page.js")[0] == 200
    listed = json.loads(ask(f"{url}/api/v1/runs")[1])
    assert listed["control"] and {r["name"] for r in listed["runs"]} == {"first", "second"}
    first, second = sorted(p.name for p in root.iterdir())
    made = ray.remote(Coordinator).options(name=actor_name(first, "coordinator-1"), namespace=NAMESPACE, num_cpus=0)
    coordinator = made.remote()
    ray.get(coordinator.state.remote(), timeout=60)
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(f"{url}/api/v1/runs/{first}/control/pause", b"")[0] == 401
    assert ask(f"{url}/api/v1/runs/{first}/control/pause", b"", **right)[0] == 202
    assert ray.get(coordinator.state.remote(), timeout=60) == ControlState(paused=True)
    status, body = ask(f"{url}/api/v1/runs/{first}/control/checkpoint", b"", **right)
    assert status == 409 and b"writes no checkpoints" in body
    status, body = ask(f"{url}/api/v1/runs/{second}/control/pause", b"", **right)
    assert status == 503 and b"Ray knows no actor of run" in body
    assert ask(f"{url}/api/v1/runs", Host="evil.example")[0] == 421


def test_a_wrong_argument_is_told() -> None:
    with pytest.raises(ValidationError, match="run_dir"):
        live({"run_dir": "x"})
