"""DrafterTrainer: AdamW on one drafter; a micro-step is short, so that rollout can take the slot back at once.

Warm start and online training are the same `train_micro_step`. Nothing here depends on how long the trainer has lived:
state moved to another process goes on bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.config.drafter import DrafterConfig
from services.core.errors import WeightError
from services.core.types import AcceptanceEstimate
from services.drafter.head import TargetHead
from services.drafter.loss import (
    DrafterLoss,
    LossTerms,
    chain_lengths,
    drafter_loss,
    expected_acceptance,
    supervised_counts,
)
from services.drafter.packing import DraftRows, check_states, pack_states
from services.drafter.state import DrafterState, check_state, new_stamp
from services.drafter.unroll import unroll
from services.models.device import tensor_cores
from services.models.drafter import Drafter
from services.models.hidden import HiddenStates
from services.models.layers import ModelSpec, RopeTable
from services.models.methods import drafter_method

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class MicroStep:
    """`expected_acceptance[k]`: mean sum of min(target_probs, draft_probs) at draft depth k + 1 before the update;
    NaN where no entry was supervised. `updated`: there was something to learn and the gradient was finite."""

    loss: float
    expected_acceptance: tuple[float, ...]
    num_tokens: int
    grad_norm: float
    updated: bool


class DrafterTrainer:
    """Holds drafter, optimizer and the target's head. `temperature` is the run's: it enters the acceptance
    and the losses about acceptance."""

    def __init__(self, spec: ModelSpec, config: DrafterConfig, temperature: float, device: torch.device) -> None:
        self.spec = spec
        self.method = drafter_method(config, spec)
        self.config = config
        self.temperature = temperature
        self.device = device
        self.total_steps = 0  # micro-steps, also those that changed nothing
        self.updates = 0  # AdamW steps
        self._stamp: str | None = None  # of the state that is held unchanged since it was loaded or copied
        self._drafter = Drafter(self.method).to(device)
        self._optimizer = self._new_optimizer()
        self._head: TargetHead | None = None
        self._rope = RopeTable(self.method.spec, 0, device, torch.float32)
        weight = config.feature_weight if self.method.matches_features else 0.0
        self._terms = LossTerms(config.loss, weight, config.unroll_decay, temperature, config.acceptance_ce_weight)

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._drafter.parameters(), lr=self.config.learning_rate, betas=BETAS, weight_decay=0)

    @property
    def head(self) -> TargetHead:
        if self._head is None:
            raise WeightError("the drafter trainer has no target head yet: call load_target_head first")
        return self._head

    def load_head(self, head: TargetHead) -> None:
        self._head = head

    def train_micro_step(self, states: Sequence[HiddenStates]) -> MicroStep:
        """One AdamW update on `states` (any number of sequences; packed in batches of config.pack_tokens)."""
        return self.train_rows(self._pack(states))

    def train_rows(self, batches: Sequence[DraftRows]) -> MicroStep:
        """One AdamW update on rows laid out by the caller."""
        counts = supervised_counts(batches, self.config.unroll)
        self._stamp = None
        self.total_steps += 1
        if not counts[0]:
            return MicroStep(0.0, (math.nan,) * self.config.unroll, 0, 0.0, False)
        losses, overlaps = list[Tensor](), list[Tensor]()
        for rows in batches:
            with tensor_cores(self.device):
                part = self._loss(rows, counts)
                part.loss.backward()
            losses.append(part.loss.detach())
            overlaps.append(part.overlap)
        norm = float(torch.nn.utils.clip_grad_norm_(self._drafter.parameters(), self.config.grad_clip))
        if math.isfinite(norm):
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        tokens = sum(b.num_tokens for b in batches)
        # asked of the device behind its last work, not batch by batch: it would wait for the processor in between
        loss, overlap = float(sum(losses)), torch.stack(overlaps).sum(0).tolist()
        means = tuple(s / n if n else math.nan for s, n in zip(overlap, counts, strict=True))
        return MicroStep(loss, means, tokens, norm, math.isfinite(norm))

    def _pack(self, states: Sequence[HiddenStates]) -> list[DraftRows]:
        check_states(states, self.method)
        # detached: states that still hang on the policy's graph would send the drafter's gradient into the policy
        cut = [s.detached() for s in states]
        return pack_states(cut, self.config.pack_tokens, self.device)

    def _grow_rope(self, length: int) -> None:
        if length > self._rope.cos.shape[0]:
            self._rope = RopeTable(self.method.spec, 2 * length, self.device, torch.float32)

    def _loss(self, rows: DraftRows, counts: Sequence[int]) -> DrafterLoss:
        head = self.head
        self._grow_rope(rows.layout.segments.shape[1])
        predicted = unroll(self._drafter, rows, head.embed, self._rope, self.config.unroll)
        return drafter_loss(predicted, rows, head.head, counts, self._terms, self._drafter.head(head.head))

    def loaded(self, tensors: Mapping[str, Tensor]) -> Drafter:
        """A drafter of its own beside the one that is trained. Raises WeightError for tensors that do not fit."""
        drafter = Drafter(self.method).to(self.device)
        drafter.load(tensors)
        return drafter

    def estimate(self, name: str, tensors: dict[str, Tensor], states: Sequence[HiddenStates]) -> AcceptanceEstimate:
        """Teacher-forced acceptance of any drafter on `states`, at the run's temperature; this trainer's own drafter
        is left alone. `num_tokens` counts the start positions averaged over."""
        return self.acceptance(name, self.loaded(tensors), states)

    @torch.no_grad()
    def acceptance(self, name: str, drafter: Drafter, states: Sequence[HiddenStates]) -> AcceptanceEstimate:
        """`estimate` of one that is loaded already."""
        depths = self.config.unroll
        sums, counts, length, starts = [0.0] * depths, [0] * depths, 0.0, 0
        for rows in self._pack(states):
            self._grow_rope(rows.layout.segments.shape[1])
            with tensor_cores(self.device):
                predicted = unroll(drafter, rows, self.head.embed, self._rope, depths)
                alphas = expected_acceptance(
                    predicted, rows, self.head.head, self.temperature, drafter.head(self.head.head)
                )
            for j, alpha in enumerate(alphas):
                sums[j] += float(alpha.sum())
                counts[j] += rows.supervised.count(j)
            lengths = chain_lengths(alphas, rows)
            length += float(lengths.sum())
            starts += int(lengths.shape[0])
        per_depth = tuple(s / n if n else 0.0 for s, n in zip(sums, counts, strict=True))
        return AcceptanceEstimate(name, per_depth, length / starts if starts else 1.0, starts)

    def load_state(self, state: DrafterState) -> None:
        """Adopt tensors, optimizer state and step count, all or nothing (WeightError). Those held already are kept."""
        if state["stamp"] == self._stamp:
            return
        check_state(state, self.method)
        self._drafter.load(state["tensors"])
        self._optimizer = self._new_optimizer()
        self.total_steps, self.updates = state["total_steps"], state["updates"]
        if self.updates:
            for name, p in self._drafter.tensors().items():
                self._optimizer.state[p] = {
                    "step": torch.tensor(float(self.updates)),
                    **{part: m[name].to(self.device, copy=True) for part, m in state["optimizer"].items()},
                }
        self._stamp = state["stamp"]

    def state(self) -> DrafterState:
        """A copy of everything `load_state` needs, on the CPU."""
        live = self._drafter.tensors()
        moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for part, into in moments.items():
            for name, p in live.items():
                if p in self._optimizer.state:
                    into[name] = self._optimizer.state[p][part].detach().to("cpu", copy=True)
        tensors = {name: p.detach().to("cpu", copy=True) for name, p in live.items()}
        self._stamp = self._stamp or new_stamp()
        return DrafterState(
            tensors=tensors,
            optimizer=moments,
            total_steps=self.total_steps,
            updates=self.updates,
            stamp=self._stamp,
        )


def train_drafter(states: Iterable[Sequence[HiddenStates]], trainer: DrafterTrainer) -> Iterator[MicroStep]:
    """The warm start: one micro-step per list of sequences, as they come; the caller looks at each and may stop."""
    for batch in states:
        yield trainer.train_micro_step(batch)
