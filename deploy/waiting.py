"""Waiting for Ray to place something, and saying meanwhile what for."""

from __future__ import annotations

from typing import Any

import ray

from deploy.console import CONSOLE, START_NEWS_S
from deploy.fitting import Resources, say


def await_placed(what: str, placed: Any, timeout_s: float) -> str | None:
    """None once the reference `placed` is ready; after `timeout_s`, what it waited for."""
    waited_s = 0.0
    while waited_s < timeout_s:
        step_s = min(START_NEWS_S, timeout_s - waited_s)
        ready, _ = ray.wait([placed], timeout=step_s)
        if ready:
            return None
        waited_s += step_s
        CONSOLE.print(f"waiting for {what}: {waited_s:.0f} s of at most {timeout_s:.0f} s; {_unused()}")
    return _unused()


def _unused() -> str:
    free: Resources = ray.available_resources()
    total: Resources = ray.cluster_resources()
    return f"unused are {say({n: free.get(n, 0.0) for n in total})} of {say(total)}, the rest is held by others"
