"""How many drafter trainers a processor has room for beside those who generate.

Slots with a GPU of their own do not need this. Where slots share one machine's cores, an idle slot is no free
processor. With 4 slots on 2 cores one trainer that has the core beside the last server makes about as many
micro-steps in a phase as three that share what is left over all the time, and a slot is free again sooner. Pure, but
for the look at the machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from services.config.schema import ClusterConfig, NativeEngine


@dataclass(frozen=True, slots=True)
class Cores:
    """`per_server`, `per_trainer`: the threads of each."""

    total: int
    per_server: int
    per_trainer: int

    def trainers(self, generating: int) -> int:
        """How many fit beside so many servers that generate; 1 where not even one fits beside a single server, for a
        drafter that is never trained is worse than one that is in the way."""
        if self.total < self.per_server + self.per_trainer:
            return 1
        return max(0, self.total - generating * self.per_server) // self.per_trainer


def shared_cores(config: ClusterConfig) -> Cores | None:
    """What the slots of a run share; None: nothing, or unknown. `placement.cores` is believed; without it a private Ray
    has this machine's."""
    place, engine = config.placement, config.rollout.engine
    total = place.cores
    if total is None and place.address is None:
        total = len(os.sched_getaffinity(0))
    if total is None or place.gpus_per_slot or not isinstance(engine, NativeEngine):
        return None
    return Cores(total, engine.threads, config.drafter.threads)
