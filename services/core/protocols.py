"""What the coordinator asks of the other services, and what a transport must offer.

The coordinator never sees a tensor: `Blob` is an opaque reference that a transport resolves at the receiver (a Ray
ObjectRef over the cluster, the value itself in one process). Every call returns a `Pending`; nothing waits without a
time-out. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NewType, Protocol, TypeVar

from services.core.checkpoints import CheckpointNote
from services.core.gain import ExpectedGain, Workload
from services.core.selector import SelectorState
from services.core.types import (
    AcceptanceEstimate,
    DrafterProgress,
    GroupWork,
    HiddenStateChunk,
    MemorySwitch,
    PartialRollout,
    PolicyStepReport,
    Prompt,
    Reward,
    Rollout,
    ServedVersions,
    ServerReport,
    TrainBatch,
)

Blob = NewType("Blob", object)
T_co = TypeVar("T_co", covariant=True)


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds, monotonic."""


class Pending(Protocol[T_co]):
    """A call under way. `result` raises what the call raised, `ServiceLostError` when the callee died, or
    `WaitTimeoutError` naming the callee and method."""

    @property
    def what(self) -> str: ...

    @property
    def answered_s(self) -> float | None:
        """When the answer was there, on the clock of whoever asked; None before."""

    def result(self, timeout_s: float) -> T_co: ...


class Waiter(Protocol):
    def wait(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[Pending[Any]]:
        """Return those that are ready, in order, as soon as at least one is, or an empty list after `timeout_s`."""


class RolloutClient(Protocol):
    """One rollout server. `epoch` is the slot lease's epoch; a stale one raises StaleEpochError at the server."""

    @property
    def name(self) -> str: ...

    def open_epoch(self, epoch: int) -> Pending[ServedVersions]:
        """Adopt `epoch`, dropping whatever an older epoch left running; answers with the served versions."""

    def submit(self, work: Sequence[GroupWork], epoch: int) -> Pending[None]: ...

    def withdraw(self, rollout_ids: Sequence[str], epoch: int) -> Pending[tuple[PartialRollout, ...]]:
        """Stop these rollouts and hand back what there is of them, for a server that continues them. One that has
        finished meanwhile is not among them: the next report tells it, as any other."""

    def advance(self, budget_s: float, epoch: int) -> Pending[ServerReport]:
        """Generate for about `budget_s`, or until nothing is left, then report."""

    def submit_and_advance(self, work: Sequence[GroupWork], budget_s: float, epoch: int) -> Pending[ServerReport]:
        """Both in one message, for a server that is not generating: a call costs its sender more than what is in it."""

    def load_policy(self, version: int, blob: Blob, epoch: int) -> Pending[ServedVersions]: ...

    def load_drafter(self, version: int, blob: Blob, epoch: int) -> Pending[ServedVersions]: ...

    def set_strategy(self, name: str | None, epoch: int) -> Pending[None]:
        """Force one strategy by name ("off", "eagle_3_1_4", ...); None gives the choice back to the selector."""

    def take_states(self, step: int, epoch: int) -> tuple[Pending[HiddenStateChunk], Blob]:
        """The hidden states kept since the last call, of the rollouts whose work asked for it; the server forgets them.
        ConfigError from an engine that keeps none."""

    def switch_memory(self, release: bool, epoch: int) -> Pending[MemorySwitch | None]:
        """Give up the GPU memory of a server that has nothing to do, or take it back; None when that is done already.
        In between it takes no work and no weights."""

    def predict_gain(self, work: Workload) -> Pending[ExpectedGain | None]:
        """What drafting is expected to gain on these rollouts, by what the server knows of costs and acceptance; None
        when its selector decides without such models. Needs no lease."""

    def selector_state(self) -> Pending[SelectorState | None]:
        """What the strategy selector has learned; None of one that learns nothing, and of a server that serves nothing
        yet. Needs no lease."""

    def restore_selector(self, state: SelectorState, epoch: int) -> Pending[bool]:
        """Let the selector of a new process go on from there; False when the state does not fit it. Before the first
        load, which would have it measure its costs."""

    def process_id(self) -> Pending[int]: ...


class DrafterClient(Protocol):
    """The drafter trainer of one slot."""

    @property
    def name(self) -> str: ...

    def initial_state(self) -> tuple[Pending[int], Blob]:
        """The training state that a run begins with, and 0."""

    def prepare(self, state: Blob) -> Pending[None]:
        """Between two leases: hold this state, so that a `begin` that brings it finds it there."""

    def begin(self, state: Blob, epoch: int, lane: int) -> Pending[int]:
        """Adopt trainable tensors and optimizer state and the epoch. `lane` tells slots that train together apart: each
        draws its own data."""

    def load_target_head(self, policy_version: int, blob: Blob) -> Pending[None]:
        """Adopt the target's embedding and LM head from a published policy."""

    def add_chunk(self, chunk: HiddenStateChunk, blob: Blob) -> Pending[None]: ...

    def train(self, budget_s: float, epoch: int) -> Pending[DrafterProgress]:
        """Run micro-steps for about `budget_s`, at least one; zero micro_steps when the buffer is empty, or when
        `interrupt` came first."""

    def interrupt(self, epoch: int) -> Pending[None]:
        """Overtakes the other calls: a `train` of this epoch, under way or to come, ends with its micro-step."""

    def snapshot(self, epoch: int) -> tuple[Pending[int], Blob]:
        """(total_steps, state): state as for `begin`."""

    def held(self) -> tuple[Pending[int], Blob]:
        """(total_steps, state) of what this trainer holds, whoever leased it; (-1, ...) before its first `begin`."""

    def merge(self, states: Sequence[Blob], micro_steps: Sequence[int]) -> tuple[Pending[int], Blob]:
        """(total_steps, state): the average of states that began from one, weighted by their micro-steps since."""

    def checkpoint(self, state: Blob) -> Pending[None]:
        """Write a state to drafter.checkpoint_dir, in the background."""

    def export(self, state: Blob) -> tuple[Pending[int], Blob]:
        """(number of tensors, trainable tensors as for RolloutClient.load_drafter)."""

    def estimate(self, drafters: dict[str, Blob], blob: Blob) -> Pending[list[AcceptanceEstimate]]:
        """Offline acceptance of several drafter states on the same chunk."""

    def process_id(self) -> Pending[int]: ...


class PolicyClient(Protocol):
    @property
    def name(self) -> str: ...

    def train_step(self, batch: TrainBatch) -> tuple[Pending[PolicyStepReport], Pending[HiddenStateChunk], Blob]:
        """One optimizer update; the chunk holds the target hidden states of the forward pass over the rollouts."""

    def steps_done(self) -> Pending[int]:
        """The last step that was trained on."""

    def publish(self) -> tuple[Pending[int], Blob, Blob]:
        """(policy_version, weights for RolloutClient.load_policy, weights for DrafterClient.load_target_head). The
        first may be an offer that servers redeem themselves (`weights.transport: collective`); TransferError says
        that one could not."""

    def switch_memory(self, release: bool) -> Pending[MemorySwitch | None]:
        """Move everything to host memory, or back to the GPU, which `train_step` needs; None when it is there already.
        GpuMemoryError when the GPU has no room."""

    def copy_of(self, version: int) -> tuple[Pending[int], Blob]:
        """(version, weights) of the published version, for a server that could not redeem its offer. Answers also while
        the policy is trained; TransferError when `version` is superseded."""

    def restored(self) -> tuple[Pending[CheckpointNote | None], Blob, Blob]:
        """(note, live, served): what the checkpoint said that the trainer went on from, and the drafter's two training
        states in it (equal when there was one). The note is None for a run that began anew."""

    def checkpoint(self, note: CheckpointNote, live: Blob | None, served: Blob | None) -> Pending[None]:
        """Copy everything as it is now, with these states of the drafter, and write it in the background; `served`
        None: it is `live`."""

    def flush(self, timeout_s: float) -> Pending[None]:
        """Answers when every checkpoint is on the disk."""


class RewardClient(Protocol):
    def score(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> Pending[list[Reward]]:
        """One reward per rollout; neither prompts nor rollouts need to have their ids."""
