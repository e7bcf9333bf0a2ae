"""Finding out what an earlier coordinator left with servers and trainers, or a checkpoint with the policy trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.coordinator.assembly import Parts
from services.coordinator.checkpoints import Checkpoints
from services.coordinator.drafting import Drafting
from services.coordinator.releases import Releases
from services.coordinator.resume import Takeover, drafter_version_after, resumed_message, takeover_message
from services.core.checkpoints import CheckpointNote
from services.core.errors import ServiceLostError
from services.core.protocols import Blob, Pending, PolicyClient
from services.core.types import RunEvent


@contextmanager
def policy_loss_told(policy: str, tell: Callable[[str, str, str], RunEvent]) -> Iterator[None]:
    """Whichever call found the policy trainer gone, a checkpoint under way or a step."""
    try:
        yield
    except ServiceLostError as error:
        if error.name != policy:
            raise
        reason = f"{error.reason}; what the policy learned since the last checkpoint died with it"
        tell("policy_lost", error.name, reason)
        raise ServiceLostError(error.name, reason) from error


@dataclass(frozen=True, slots=True)
class _Drafters:
    """What training goes on from, what is served, and where they come from."""

    live: Blob | None
    served: Blob | None
    source: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """`ask` waits for an answer of the policy trainer."""

    parts: Parts
    policy: PolicyClient
    drafting: Drafting
    releases: Releases
    checkpoints: Checkpoints
    ask: Callable[[Pending[Any]], Any]

    def take_over(self, takeover: Takeover) -> int:
        """Bring every part to where the run is. Returns the steps that the policy was trained on."""
        steps_done: int = self.ask(self.policy.steps_done())
        pending, kept_live, kept_served = self.policy.restored()
        note: CheckpointNote | None = self.ask(pending)
        news = None if note is None else self.checkpoints.go_on(note, steps_done)
        served = self.parts.fleet.survey()
        drafters = self._drafters(note, kept_live, kept_served)
        kept_version = note.drafter_version or 0 if note else 0
        version = drafter_version_after(max(takeover.drafter_version, kept_version), served)
        self.drafting.live = drafters.live
        self.releases.go_on(version, drafters.served)
        if takeover.resumed:
            self.parts.tell("run_resumed", "run", resumed_message(steps_done, self.parts.config.run.steps, note))
        else:
            message = takeover_message(takeover, len(served), drafters.source, version)
            self.parts.tell("coordinator_returned", "coordinator", message)
        if news is not None:
            self.parts.tell("prompts_changed", "run", news)
        return steps_done

    def _drafters(self, note: CheckpointNote | None, live: Blob, served: Blob) -> _Drafters:
        """What a trainer holds is newer than any checkpoint."""
        held = self.parts.trainers.recover()
        if held is not None:
            return _Drafters(held, held, "what a trainer held")
        if note is not None and note.drafter_version is not None:
            return _Drafters(live, served if note.drafter_ahead else live, "the checkpoint")
        return _Drafters(self.drafting.live, self.drafting.live, "its first state")
