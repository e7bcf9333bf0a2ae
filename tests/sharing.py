"""Who takes which tests when several processes of pytest-xdist share them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
WITH_RAY = "files that start Ray"


@cache
def unit_of(file: str) -> str:
    return WITH_RAY if "mark.ray" in (ROOT / file).read_text(encoding="utf-8") else file


class FilesAndRay(LoadScopeScheduling):
    """A file stays in one process, for its fixtures. All files that start Ray stay in one, too, so that no two of them
    meet on a machine of two cores; what happens beside them are tests of one process each. Give it
    `--no-loadscope-reorder`: the files with Ray, together the longest, are then among the first to be handed out.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])
