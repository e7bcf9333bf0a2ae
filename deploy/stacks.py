"""The stacks of a run's processes, by py-spy on their own machines: it reads a process from outside, so one that is
stuck in a call answers too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

DUMP_S = 20.0
ANSWER_S = 60.0  # a process for the question starts first


def stacks_of(actors: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Of those that live, by name."""
    alive = {name: actor for name, actor in actors.items() if actor["State"] == "ALIVE"}
    asked = {name: _ask(actor["Address"]["NodeID"], actor["Pid"]) for name, actor in alive.items()}
    for name, ref in asked.items():
        yield f"stack of {name}:"
        try:
            text = ray.get(ref, timeout=ANSWER_S)
        except GetTimeoutError:
            text = f"no answer from its machine within {ANSWER_S:.0f} s"
        except RayError as error:
            text = f"no answer from its machine: {str(error).splitlines()[0]}"
        yield from (f"  {line}" for line in text.splitlines())


def _ask(node: str, pid: int) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_dump).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(pid)


def _dump(pid: int) -> str:
    tool = shutil.which("py-spy") or os.path.join(os.path.dirname(sys.executable), "py-spy")
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_S, check=False
        )
    except FileNotFoundError:
        return "py-spy is not installed there: pip install 'ray[default]'"
    except subprocess.TimeoutExpired:
        return f"py-spy did not end within {DUMP_S:.0f} s"
    if done.returncode:
        return f"py-spy was refused (it needs root, or SYS_PTRACE in a container): {done.stderr.strip()}"
    return done.stdout
