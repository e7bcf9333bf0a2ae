"""Starting `stock.py`, and what its answers say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 400.0


def stock_engine(job: Mapping[str, Any], place: Path) -> list[dict[str, Any]]:
    """Its cells; it must have loaded nothing of ours."""
    (place / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "SGLANG_PLUGINS": "none"}  # an allow-list: ours is not on it
    script = Path(__file__).with_name("stock.py")
    with (place / "log").open("w") as log:
        code = subprocess.run(
            [sys.executable, str(script), str(place / "job.json"), str(place / "out.json")],
            cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
        ).returncode  # fmt: skip
    assert code == 0, (place / "log").read_text()[-4000:]
    told = json.loads((place / "out.json").read_text())
    assert told["own_modules"] == []
    cells: list[dict[str, Any]] = told["cells"]
    return cells


def verify_steps(answers: Sequence[Mapping[str, Any]]) -> int:
    return sum(n for a in answers for n in a["histogram"])


def acceptance_length(answers: Sequence[Mapping[str, Any]]) -> float:
    accepted = sum(k * n for a in answers for k, n in enumerate(a["histogram"]))
    return 1 + accepted / verify_steps(answers)
