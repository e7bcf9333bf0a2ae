"""What a run waits for at this moment: whom the coordinator asked for what, who holds which slot until when, and who
serves which versions. Read from another thread than the coordinator's; every part is a copy."""

from __future__ import annotations

from dataclasses import dataclass

from services.coordinator.calls import Calls
from services.coordinator.fleet import Fleet
from services.coordinator.leases import HELD, LeaseBook
from services.coordinator.progress import ProgressBoard
from services.core.protocols import Clock
from services.core.types import ServedVersions


@dataclass(frozen=True, slots=True)
class Asked:
    """A call without an answer yet: "rollout-1.advance", for how long, of how long at most, in seconds."""

    what: str
    owner: str
    waited_s: float
    allowed_s: float


@dataclass(frozen=True, slots=True)
class SlotHeld:
    """`expires_s`: until the lease runs out without a heartbeat; None for a slot that nobody holds. `served`: what its
    server acknowledged last."""

    slot: int
    state: str
    epoch: int
    expires_s: float | None
    served: ServedVersions | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`asked`: longest first. `silent_s`: seconds since each service's last answer."""

    phase: str
    step: int
    num_steps: int
    policy_version: int
    drafter_version: int
    slots: tuple[SlotHeld, ...]
    asked: tuple[Asked, ...]
    silent_s: dict[str, float]


def diagnose(board: ProgressBoard, leases: LeaseBook, fleet: Fleet, calls: Calls, clock: Clock) -> Diagnosis:
    now, view = clock(), board.latest
    held = []
    for slot in range(len(leases)):
        lease = leases[slot]
        expires_s = lease.deadline_s - now if lease.state in HELD else None
        held.append(SlotHeld(slot, lease.state.value, lease.epoch, expires_s, fleet.served(slot)))
    asked = [Asked(c.pending.what, c.owner, now - c.asked_s, c.timeout_s) for c in calls.under_way]
    return Diagnosis(
        phase=view.phase,
        step=view.step,
        num_steps=view.num_steps,
        policy_version=view.policy_version,
        drafter_version=view.drafter_version,
        slots=tuple(held),
        asked=tuple(sorted(asked, key=lambda call: -call.waited_s)),
        silent_s={owner: now - at for owner, at in calls.last_answers.items()},
    )
