"""When a checkpoint is written, and what the coordinator has to say in it. The policy trainer writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from services.config.schema import RunConfig
from services.coordinator.calls import Calls
from services.coordinator.fleet import Patience
from services.coordinator.work import fingerprint
from services.core.checkpoints import CheckpointNote, DataPosition
from services.core.errors import ServiceLostError
from services.core.protocols import Blob, PolicyClient
from services.core.types import HiddenStateChunk, Prompt


class Checkpoints:
    """`recorded`: the step that a checkpoint can be of now, None while the policy is ahead of what was told.
    `counters` gives the totals to keep."""

    def __init__(
        self, config: RunConfig, policy: PolicyClient, calls: Calls, patience: Patience, prompts: Sequence[Prompt]
    ) -> None:
        self._config, self._policy, self._calls, self._patience = config, policy, calls, patience
        self.data = DataPosition(fingerprint(prompts))
        self.recorded: int | None = None
        self.counters: Callable[[], Mapping[str, float]] = dict
        self._saved: int | None = None
        self._wanted = False

    def go_on(self, note: CheckpointNote) -> str | None:
        """Go on from a checkpoint; a message when the prompts are others than then: they begin at their first one."""
        self._saved = self.recorded = note.step
        if note.data.fingerprint == self.data.fingerprint:
            self.data = note.data
            return None
        self.data = DataPosition(self.data.fingerprint, since=note.step)
        return (
            f"the prompts are others than before: step {note.step + 1} takes the first of the new set. Held-out "
            "rewards from here on compare with earlier ones only if the held-out prompts are the same"
        )

    def want(self) -> None:
        """Write one after the step under way, whatever the interval. May be called from any thread."""
        self._wanted = True

    def due(self, step: int) -> bool:
        run = self._config
        if not run.checkpoint_every or step == self._saved:
            return False
        evaluated = bool(run.keep_best and run.eval_every) and step % run.eval_every == 0
        return self._wanted or step % run.checkpoint_every == 0 or step == run.steps or evaluated

    def save(
        self,
        step: int,
        live: Blob | None,
        served: Blob | None,
        drafter_version: int | None,
        buffer: tuple[HiddenStateChunk, ...],
    ) -> None:
        """Ask for one and go on: the trainer copies its state before it does anything else."""
        self._wanted, self._saved = False, step
        ahead = live is not served
        note = CheckpointNote(step, drafter_version, self.data, ahead, buffer, dict(self.counters()))
        pending = self._policy.checkpoint(note, live, served if ahead else None)
        name = self._policy.name
        self._calls.post(name, pending, lambda _: None, self._lost, self._patience.call_s)

    @property
    def can_save_now(self) -> bool:
        return bool(self._config.checkpoint_every) and self.recorded not in (None, 0, self._saved)

    def flush(self) -> None:
        """Wait until all are on the disk, also when the run is being stopped. Raises ServiceLostError,
        WaitTimeoutError and DataError."""
        if self._config.checkpoint_every:
            self._policy.flush(self._patience.call_s).result(self._patience.call_s)

    def _lost(self, reason: str) -> None:
        raise ServiceLostError(self._policy.name, reason)
