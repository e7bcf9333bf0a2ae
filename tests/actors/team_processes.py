"""The processes of a policy team's workers, of a Ray that this process started."""

from __future__ import annotations

from contextlib import suppress

import psutil


def team_workers() -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended meanwhile, as killed actors of other tests do
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found
