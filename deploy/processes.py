"""Processes this program started: which there are, and making sure that none is left."""

from __future__ import annotations

import psutil

GRACE_S = 5.0


def descendants() -> list[psutil.Process]:
    """Children of this process and theirs. psutil tells a reused process id apart by its start time."""
    return psutil.Process().children(recursive=True)


def processor_s(process: psutil.Process) -> float:
    """Processor seconds until now, in user code and in the kernel's. psutil.NoSuchProcess for one that has ended."""
    times = process.cpu_times()
    return float(times.user + times.system)


def end_processes(processes: list[psutil.Process]) -> None:
    """Wait until all have ended; what outlives its grace is killed. They were seen as our own children."""
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=GRACE_S)


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; a zombie has."""
    _, alive = psutil.wait_procs(processes, timeout=0)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
