"""When a checkpoint is written, and what the coordinator has to say in it. The policy trainer writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.config.schema import RunConfig
from services.coordinator.assembly import Parts
from services.coordinator.drafting import Drafting
from services.coordinator.fleet import Patience
from services.coordinator.releases import Releases
from services.coordinator.selectors import SelectorStates
from services.coordinator.work import fingerprint
from services.coordinator.worth import Worth
from services.core.checkpoints import CheckpointNote, DataPosition
from services.core.errors import ServiceLostError
from services.core.protocols import PolicyClient
from services.core.types import Prompt


@dataclass(frozen=True, slots=True)
class Learned:
    selectors: SelectorStates
    worth: Worth


class Checkpoints:
    """`recorded`: the step that a checkpoint can be of now, None while the policy is ahead of what was told.
    `data` says where the run is in its prompts. `learned`: what the coordinator's own parts and the servers know."""

    def __init__(
        self,
        policy: PolicyClient,
        prompts: Sequence[Prompt],
        parts: Parts,
        drafting: Drafting,
        releases: Releases,
        patience: Patience,
        learned: Learned,
    ) -> None:
        self._run: RunConfig = parts.config.run
        self._policy, self._parts, self._patience = policy, parts, patience
        self._drafting, self._releases, self._learned = drafting, releases, learned
        self.data = DataPosition(fingerprint(prompts))
        self.recorded: int | None = None
        self._saved: int | None = None

    def go_on(self, note: CheckpointNote, steps_done: int) -> str | None:
        """Go on from a checkpoint; a message when the prompts are others than then: they begin at their first one.
        `steps_done`: where the policy is; what was made of later steps than the checkpoint's died with a coordinator.
        """
        self._saved = self.recorded = note.step
        self._learned.selectors.go_on(note.selectors)
        if note.worth is not None and note.step == steps_done:
            self._learned.worth.restore(note.worth)
        if note.data.fingerprint == self.data.fingerprint:
            self.data = note.data
            return None
        self.data = DataPosition(self.data.fingerprint, since=note.step)
        return (
            f"the prompts are others than before: step {note.step + 1} takes the first of the new set. Held-out "
            "rewards from here on compare with earlier ones only if the held-out prompts are the same"
        )

    def now(self) -> str:
        """Write one between two steps, whatever the interval, and wait until it is on the disk; says of which step.
        Raises as `flush` does."""
        step = self.recorded
        if not step:
            return "no step is done yet: there is nothing to go on from but the beginning"
        if step != self._saved:
            self._save(step)
        self.flush()
        return f"step {step} is on the disk"

    def after(self, step: int) -> None:
        """Write one if it is due."""
        if self._due(step):
            self._save(step)

    def before_stopping(self) -> None:
        """What is recorded is not to be lost to a stop. Raises as `flush` does."""
        step = self.recorded
        if self._run.checkpoint_every and step and step != self._saved:
            self._save(step)
        self.flush()

    def flush(self) -> None:
        """Wait until all are on the disk, also when the run is being stopped. Raises ServiceLostError,
        WaitTimeoutError and DataError."""
        if self._run.checkpoint_every:
            self._policy.flush(self._patience.call_s).result(self._patience.call_s)

    def _due(self, step: int) -> bool:
        run = self._run
        if not run.checkpoint_every or step == self._saved:
            return False
        judged = bool(run.keep_best and run.eval_every) and step % run.eval_every == 0
        return step % run.checkpoint_every == 0 or step == run.steps or judged

    def _save(self, step: int) -> None:
        """Ask for one and go on: the trainer copies its state before it does anything else."""
        self._saved = step
        live, served, drafter = self._drafting.live, self._releases.served, self._parts.fleet.drafter
        ahead = live is not served
        note = CheckpointNote(
            step,
            drafter.version if drafter else None,
            self.data,
            ahead,
            self._parts.trainers.chunks,
            self._learned.selectors.known,
            self._learned.worth.state(),
        )
        pending = self._policy.checkpoint(note, live, served if ahead else None)
        self._parts.calls.post(self._policy.name, pending, lambda _: None, self._lost, self._patience.call_s)

    def _lost(self, reason: str) -> None:
        raise ServiceLostError(self._policy.name, reason)
