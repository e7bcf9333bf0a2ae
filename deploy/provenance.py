"""Where a measurement came from: commit, card or processor, library versions."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
ARCHIVED = "$Format:%H$"  # `git archive` puts the commit here (.gitattributes)


def provenance() -> dict[str, Any]:
    """Keys commit and dirty (None where neither a checkout nor an archive tells), card and driver ("none" without one),
    processor, torch, python."""
    commit, dirty = _source()
    return {
        "commit": commit,
        "dirty": dirty,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _driver() if torch.cuda.is_available() else "none",
        "processor": _processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _source() -> tuple[str | None, bool | None]:
    if not ARCHIVED.startswith("$"):
        return ARCHIVED, None
    status = _git("status", "--porcelain")
    return _git("rev-parse", "HEAD"), None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None  # no git, or not answering: the measurement is still worth printing
    return done.stdout.strip() if done.returncode == 0 else None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
