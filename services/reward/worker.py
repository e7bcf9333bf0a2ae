"""What runs inside a worker process of the reward pool. Imports stay light: no torch, whatever the service's process
holds.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from services.config.reward import RewardConfig
from services.core.types import Prompt, Reward, Rollout
from services.reward.verifiers import Verifier, make_verifier

MEMORY_BYTES = 4 * 2**30  # beyond what the worker holds when idle: 10^(10^10) must not take the machine's memory
CPU_MARGIN_S = 5
ERROR_CHARS = 300

Pair = tuple[Prompt, Rollout]


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """What a worker needs to build its verifier; see `make_verifier`."""

    config: RewardConfig
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_installed: dict[str, Verifier] = {}  # this process's one verifier, under "verifier"


def start(spec: VerifierSpec) -> None:
    """Once per process, before its first task and off the task's clock."""
    # The pool's own handler cannot run while one C call hangs; the default action always ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _installed["verifier"] = make_verifier(spec.config, spec.params)
    _limit_memory()


def score_batch(pairs: Sequence[Pair], timeout_s: float) -> list[Reward]:
    """One reward per pair, in order."""
    _limit_cpu(timeout_s)
    try:
        return [_score(prompt, rollout) for prompt, rollout in pairs]
    finally:
        _limit_cpu(None)


def _score(prompt: Prompt, rollout: Rollout) -> Reward:
    try:
        reward = _installed["verifier"](prompt, rollout)
    except Exception as error:  # noqa: BLE001 - the process edge: whatever third-party graders raise is counted, not lost
        return Reward(value=0.0, correct=False, error=f"{type(error).__name__}: {error}"[:ERROR_CHARS])
    if not math.isfinite(reward.value):
        return Reward(value=0.0, correct=False, error=f"the verifier gave {reward.value}")
    return reward


def _die_with_parent() -> None:
    """A worker whose service was killed must not live on."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _limit_cpu(timeout_s: float | None) -> None:
    """A kernel limit for the case that the parent is killed while a C call holds this process: no thread could run.
    None lifts it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = hard
    if timeout_s is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        soft = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + CPU_MARGIN_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _limit_memory() -> None:
    """Running out of memory becomes a MemoryError of one rollout. Linux only: elsewhere the use is not to be read."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
