"""Who goes first on a busy processor."""

from __future__ import annotations

import os


def run_behind_others() -> None:
    """From here on the calling thread gets processor time that nobody else wants (SCHED_IDLE), for good: an
    unprivileged thread cannot go back. Threads that it starts later inherit that. Nothing happens where the system has
    no such class."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
