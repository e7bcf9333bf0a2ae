"""When a process that must answer at once looks for garbage."""

from __future__ import annotations

import gc
from typing import Any

# Objects that come in a phase until they are looked at in its middle all the same, which takes about a quarter of a
# second. A step of a thousand servers with eight responses each makes half of that; Python's own 700 are a thousand
# looks in such a step, which take half a second of processor time and find nothing.
MANY = 1_000_000


class CollectBetweenSteps:
    """A RunObserver that collects all garbage with each step, when no server waits, and nowhere else as long as there
    is no flood of it: Python would do it in the middle of a phase. Nothing but what refers to itself waits for it."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # modules live as long as the process
        gc.set_threshold(MANY)

    def step(self, metrics: Any) -> None:
        gc.collect()

    def __getattr__(self, method: str) -> Any:
        return lambda *args: None
