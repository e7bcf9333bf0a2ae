"""Control requests to runs on Ray: from a process that is connected to it, and from one that must not be.

A process that is connected to Ray ends when that Ray does. The page outlives the runs it shows, so it asks from a
process of its own (`python -m deploy.control`), which takes a few seconds and then ends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.naming import NAMESPACE, actor_name
from deploy.reaching import why_unreachable
from services.coordinator.control import ControlRequest
from services.core.errors import ControlRefusedError, LongtailError, ServiceLostError, WaitTimeoutError
from services.report.records import read_json

CALL_S = 15.0  # the coordinator answers in a thread of its own
PROCESS_S = 90.0  # start, connect, ask: seconds, unless the machine is busy
ERRORS: dict[str, type[LongtailError]] = {
    "ControlRefusedError": ControlRefusedError,
    "WaitTimeoutError": WaitTimeoutError,
}


def newest_coordinator(names: Sequence[str], run_id: str) -> str | None:
    """The name of the run's coordinator with the highest incarnation: earlier ones died, and Ray may not have
    forgotten them yet."""
    pattern = re.compile(re.escape(actor_name(run_id, "coordinator")) + r"(?:-(\d+))?")
    found = [(int(m[1] or 0), name) for name in names if (m := pattern.fullmatch(name))]
    return max(found)[1] if found else None


class RayChannel:
    """A ControlChannel for a process that is connected to the Ray of the runs, in namespace `longtail` or another."""

    def send(self, run_id: str, request: ControlRequest) -> str:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
        name = newest_coordinator(names, run_id)
        if name is None:
            raise ServiceLostError("the run's coordinator", f"Ray knows no actor of run {run_id}: it is not running")
        try:
            coordinator = ray.get_actor(name, namespace=NAMESPACE)
            answer: str = ray.get(coordinator.control.remote(request), timeout=CALL_S)
        except GetTimeoutError:
            raise WaitTimeoutError(f"the coordinator of {run_id} did not answer within {CALL_S:.0f} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, LongtailError):
                raise error.cause from None
            raise
        except (RayActorError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise ServiceLostError("the run's coordinator", reason) from None
        return answer


class ProcessChannel:
    """A ControlChannel for a process that stays away from Ray. `address` None: where each run's run.json says."""

    def __init__(self, runs_dir: Path, address: str | None = None) -> None:
        self._runs_dir, self._address = runs_dir, address

    def send(self, run_id: str, request: ControlRequest) -> str:
        """`run_id` is one that the gateway found in the folder."""
        about = _ray_of(self._runs_dir / run_id)
        address = self._address or about.get("address")
        if address is None:
            raise ServiceLostError(
                f"run {run_id}", "its folder names no Ray: it runs without Ray (placement.mode: local) or has not begun"
            )
        reason = why_unreachable(address)
        if reason is not None:
            raise ServiceLostError(f"Ray at {address}", f"{reason}: the run has ended, or its machine is not there")
        order = json.dumps({"address": address, "run_id": run_id, "request": asdict(request)})
        try:
            done = subprocess.run(
                [sys.executable, "-m", "deploy.control"], input=order, capture_output=True, text=True,
                timeout=PROCESS_S, check=False, env=_environment(about.get("auth_mode")),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise WaitTimeoutError(
                f"no connection to Ray at {address} within {PROCESS_S:.0f} s: has the run ended?"
            ) from None
        return _answer(done, address)


def _ray_of(run_dir: Path) -> dict[str, str | None]:
    """How the Ray of the run's last start is reached, as the driver told it."""
    starts = (read_json(run_dir / "run.json") or {}).get("starts")
    return (starts[-1].get("ray") or {}) if starts else {}


def _environment(auth_mode: str | None) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    chosen = {} if auth_mode is None else {"RAY_AUTH_MODE": auth_mode}
    return {**chosen, **os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}


def _answer(done: subprocess.CompletedProcess[str], address: str) -> str:
    """Its last line is JSON; Ray may have written lines of its own before, or ended the process without one."""
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        told = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        if "InvalidAuthToken" in done.stderr:
            told = "it asks for its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
        raise ServiceLostError(f"Ray at {address}", told)
    answer: dict[str, str] = json.loads(lines[-1])
    if "error" in answer:
        kind = ERRORS.get(answer["error"])
        raise kind(answer["message"]) if kind else ServiceLostError("the run's coordinator", answer["message"])
    return answer["message"]


def _main(order: dict[str, Any]) -> dict[str, str]:
    import ray

    ray.init(address=order["address"], namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    try:
        return {"message": RayChannel().send(order["run_id"], ControlRequest(**order["request"]))}
    except ServiceLostError as error:
        return {"error": "ServiceLostError", "message": error.reason}
    except LongtailError as error:
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        ray.shutdown()


if __name__ == "__main__":
    signal.alarm(int(PROCESS_S))  # also when whoever waits for it has gone
    print(json.dumps(_main(json.load(sys.stdin))))
