"""After tensors were lost with a machine: the drafter goes on from what the trainers that are left hold."""

from __future__ import annotations

from collections.abc import Callable

from services.coordinator.calls import Calls
from services.coordinator.drafting import Drafting
from services.coordinator.fleet import Fleet
from services.coordinator.releases import Releases
from services.coordinator.trainers import Trainers
from services.core.types import RunEvent


def salvage(
    fleet: Fleet,
    trainers: Trainers,
    drafting: Drafting,
    releases: Releases,
    calls: Calls,
    tell: Callable[[str, str, str], RunEvent],
) -> None:
    """Find a live state, publish it as the next drafter version, and forget every other reference that may be lost.
    No slot trains meanwhile; the policy must be published again by whoever calls this.

    Raises ServiceLostError when no drafter trainer is left.
    """
    trainers.forget_chunks()
    fleet.release_all()
    drafting.finish()
    calls.blobs_lost = False
    if not trainers.clients:
        return
    first = trainers.first_state()
    held = trainers.recover()
    drafting.live = live = first if held is None else held
    releases.begin_again(first, live)
    fleet.drafter = releases.publish_first()
    source = "what a trainer holds" if held is not None else "the state it began with"
    tell("drafter_salvaged", "drafter", f"tensors were lost with a machine: the drafter goes on from {source}")
