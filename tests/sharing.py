"""Who takes which tests when several processes of pytest-xdist share them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
WITH_RAY = "files that start Ray"


@cache
def unit_of(file: str) -> str:
    text = (ROOT / file).read_text(encoding="utf-8")
    return WITH_RAY if "mark.ray" in text and "two_nodes" not in text else file


class FilesAndRay(LoadScopeScheduling):
    """A file stays in one process, for its fixtures. All files that start Ray on this machine stay in one, too: none
    finds another's Ray, and two cores have one to carry. Those whose Ray lives in network and process namespaces of
    its own may run beside them; they wait most of their time. Give it `--no-loadscope-reorder`: the files with Ray,
    together the longest, are then among the first to be handed out.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])

    def remove_node(self, node: Any) -> str | None:
        """The test under way when a process ended, as by its time-out, has failed: left unmarked it would end the next
        process, too."""
        for unit in self.assigned_work[node].values():
            for nodeid, done in unit.items():
                if not done:
                    unit[nodeid] = True
                    super().remove_node(node)
                    return nodeid
        super().remove_node(node)
        return None
