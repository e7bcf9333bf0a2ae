"""`longtail page` as a process of its own, for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

TOKEN = "a-token-of-this-test-0123456789"


@dataclass(frozen=True)
class Served:
    url: str
    port: int
    process: subprocess.Popen[str]


@contextmanager
def served(runs_dir: Path, *options: str, token: str | None = TOKEN) -> Iterator[Served]:
    """On a free port of the loopback address, until the block ends."""
    env = {**os.environ, "PYTHONPATH": os.getcwd()} | ({"LONGTAIL_TOKEN": token} if token else {})
    command = [sys.executable, "-m", "deploy", "page", str(runs_dir), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    late = Timer(120.0, process.kill)  # reading its first line would wait for ever otherwise
    late.start()
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        late.cancel()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found, line + process.stderr.read()
        yield Served(found[0].rstrip("/"), int(found[1]), process)
    finally:
        late.cancel()
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
