"""Actors of an earlier driver of the same run: Ray ends them in its own time, and until then they have their names."""

from __future__ import annotations

import re
import time

import ray

from deploy.naming import NAMESPACE, actor_name
from services.core.errors import WaitTimeoutError

POLL_S = 0.5


def await_names_free(run_id: str, timeout_s: float) -> None:
    """Wait until no actor of the run is left in the cluster. Raises WaitTimeoutError naming those that are."""
    give_up_s = time.monotonic() + timeout_s
    while left := _actors_of(run_id):
        if time.monotonic() > give_up_s:
            raise WaitTimeoutError(
                f"actors of an earlier start of this run are still there after {timeout_s:.0f} s: {', '.join(left)}. "
                "Stop the job they belong to, or set another run.id"
            )
        time.sleep(POLL_S)


def _actors_of(run_id: str) -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    ours = re.compile(re.escape(actor_name(run_id, "")) + r"(rollout|drafter|policy|reward|coordinator)(-\d+)?")
    return sorted(a["name"] for a in found if a["namespace"] == NAMESPACE and ours.fullmatch(a["name"]))
