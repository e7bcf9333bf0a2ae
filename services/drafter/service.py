"""DrafterService: the drafter trainer of one slot behind its contract. Every call names the slot's lease epoch."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.config.schema import ClusterConfig
from services.core.errors import BatchError, StaleEpochError, WeightError
from services.core.protocols import Clock
from services.core.types import AcceptanceEstimate, DrafterProgress, HiddenStateChunk
from services.drafter.buffer import HiddenStateBuffer, open_buffer
from services.drafter.checkpoint import checkpoint_writer, snapshot_of
from services.drafter.head import read_target_head, target_head
from services.drafter.packing import check_states
from services.drafter.progress import summarise
from services.drafter.state import DrafterState, check_state, merge_states
from services.drafter.trainer import DrafterTrainer, MicroStep
from services.models.device import free_cache, pick_device
from services.models.files import model_dir, read_config
from services.models.hidden import HiddenStates
from services.models.layers import model_spec
from services.models.target import check_tensors
from services.weights.checkpoint import CheckpointWriter

ESTIMATE_TOKENS = 8192


def evenly(states: list[HiddenStates], tokens: int) -> list[HiddenStates]:
    """Every k-th sequence, so that about `tokens` tokens are left of all (at least one sequence)."""
    total = sum(len(h.input_ids) for h in states)
    return states[:: max(1, round(total / tokens))]


class DrafterService:
    """Idle until `begin`; then trains in short budgets on what `add_chunk` brought. `slot` is for messages only: two
    slots with equal chunks and states do equal work."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        buffer: HiddenStateBuffer,
        seed: int,
        slot: int,
        clock: Clock,
        checkpoints: CheckpointWriter | None = None,
    ) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._buffer = buffer
        self._seed = seed
        self._slot = slot
        self._clock = clock
        self._epoch = self._interrupted = -1
        self._lane = 0
        self._begun = False

    def begin(self, state: DrafterState, epoch: int, lane: int = 0) -> int:
        """Adopt a drafter state under a lease and tell its total_steps; `lane` is this slot's number among those that
        train together. Raises StaleEpochError for an older epoch, WeightError for a state that does not fit; the
        trainer then keeps what it had."""
        if epoch < self._epoch:
            raise StaleEpochError(f"drafter slot {self._slot} serves epoch {self._epoch}, begin came with {epoch}")
        self._trainer.load_state(state)
        self._epoch, self._lane, self._begun = epoch, lane, True
        return self._trainer.total_steps

    def prepare(self, state: DrafterState) -> None:
        """Take over a state that the next `begin` will probably bring, while there is time: between two leases."""
        self._trainer.load_state(state)
        self._begun = True

    def load_target_head(self, policy_version: int, tensors: Mapping[str, Tensor]) -> None:
        """Adopt embedding and LM head of a published policy. Raises WeightError when they are missing or older than
        those in use."""
        now = self._trainer.head.policy_version
        if policy_version < now:
            raise WeightError(f"target head {policy_version} refused: the drafter trainer already has version {now}")
        self._trainer.load_head(target_head(tensors, self._trainer.spec, policy_version, self._trainer.device))

    def add_chunk(self, chunk: HiddenStateChunk, tensors: list[HiddenStates]) -> None:
        """Put a policy step's hidden states into the buffer. BatchError when they are not what the chunk says."""
        counted = (len(tensors), sum(len(h.input_ids) for h in tensors), {h.policy_version for h in tensors})
        stated = (chunk.num_sequences, chunk.num_tokens, {chunk.policy_version} if tensors else set())
        if counted != stated:
            raise BatchError(
                f"hidden-state chunk of step {chunk.step} says {stated} (sequences, tokens, policy versions) "
                f"but brought {counted}"
            )
        check_states(tensors, self._trainer.method)
        self._buffer.add(tensors)

    def train(self, budget_s: float, epoch: int) -> DrafterProgress:
        """Micro-steps for about `budget_s` seconds, at least one; none on an empty buffer or after `interrupt`."""
        self._check(epoch)
        started = self._clock()
        steps: list[MicroStep] = []
        while len(self._buffer) and self._interrupted != epoch and (not steps or self._clock() - started < budget_s):
            steps.append(self._trainer.train_micro_step(self._draw()))
        if self._interrupted == epoch:  # somebody else has the GPU when this is answered
            free_cache(self._trainer.device)
        return summarise(steps, self._trainer.total_steps, self._clock() - started, self._buffer)

    def interrupt(self, epoch: int) -> None:
        """May be called from another thread while `train` runs: it ends with its micro-step, and so does a later one
        of the same epoch. Of an epoch that is over it changes nothing."""
        self._interrupted = epoch

    def _draw(self) -> list[HiddenStates]:
        """Random numbers belong to micro-step and lane, not to the process: a moved trainer draws what it would
        have."""
        rng = random.Random(f"drafter {self._seed} {self._trainer.total_steps} {self._lane}")
        return self._buffer.sample(self._trainer.config.pack_tokens, rng)

    def snapshot(self, epoch: int) -> tuple[int, DrafterState]:
        """(total_steps, a copy of the state) for the next `begin`, here or in another slot. A lease ends with it."""
        self._check(epoch)
        free_cache(self._trainer.device)
        return self._trainer.total_steps, self._trainer.state()

    def held(self) -> tuple[int, DrafterState | None]:
        """(total_steps, state) as it is now, for a coordinator that knows nothing; (-1, None) before `begin`."""
        return (self._trainer.total_steps, self._trainer.state()) if self._begun else (-1, None)

    def merge(self, states: Sequence[DrafterState], micro_steps: Sequence[int]) -> tuple[int, DrafterState]:
        """(total_steps, average) of states that began from one state and made so many micro-steps since."""
        for state in states:
            check_state(state, self._trainer.method)
        merged = merge_states(states, micro_steps)
        return merged["total_steps"], merged

    def checkpoint(self, state: DrafterState) -> None:
        """Write a state to drafter.checkpoint_dir in the background. Raises DataError when an earlier one could not be
        written."""
        assert self._checkpoints is not None
        self._checkpoints.save(snapshot_of(state, self._trainer.method))

    def export(self, state: DrafterState) -> tuple[int, dict[str, Tensor]]:
        """(number of tensors, the trainable tensors only), as rollout servers load them: those of `state` itself."""
        check_tensors(state["tensors"], self._trainer.method.names(), "drafter export")
        return len(state["tensors"]), state["tensors"]

    def estimate(self, drafters: dict[str, DrafterState], tensors: list[HiddenStates]) -> list[AcceptanceEstimate]:
        """Offline acceptance of each drafter on the same hidden states, in the order of `drafters`.

        On an even selection of about ESTIMATE_TOKENS tokens: rollout waits meanwhile, and more would not tell more.
        """
        tensors = evenly(tensors, ESTIMATE_TOKENS)
        for state in drafters.values():
            check_state(state, self._trainer.method)
        estimates = [self._trainer.estimate(name, state["tensors"], tensors) for name, state in drafters.items()]
        free_cache(self._trainer.device)
        return estimates

    def _check(self, epoch: int) -> None:
        if not self._begun or epoch != self._epoch:
            raise StaleEpochError(
                f"drafter slot {self._slot} serves epoch {self._epoch if self._begun else None}, not {epoch}: "
                "call begin with a state first"
            )


def build_drafter_service(config: ClusterConfig, slot: int, clock: Clock = time.monotonic) -> DrafterService:
    """A trainer with the model folder's own embedding and LM head (policy version 0), waiting for `begin`."""
    torch.set_num_threads(config.drafter.threads)
    folder = model_dir(config.model.path)
    spec, device = model_spec(read_config(folder)), pick_device(config.model.device)
    trainer = DrafterTrainer(spec, config.drafter, config.rollout.sampling.temperature, device)
    trainer.load_head(read_target_head(folder, spec, device))
    buffer, folder = open_buffer(config.drafter), config.drafter.checkpoint_dir
    writer = None if folder is None else checkpoint_writer(folder, f"slot-{slot}")
    return DrafterService(trainer, buffer, config.run.seed, slot, clock, writer)
