"""PolicyTrainer: one train_step turns rollouts with advantages into a policy version, and yields hidden states.

    admit -> parts, one per update -> weights over each part -> packs
          -> inner_epochs x (per part: forward, backward per pack; clip; AdamW)

The drafter's hidden states are the policy's last hidden states *before* the first update, the ones the rollouts were
sampled with. With one update per step they come from the first inner epoch's forward pass, which is the only one then;
with several a forward pass over the whole batch goes ahead. Rollouts without a signal that the loss skips still run
forward once, without gradients, so that the drafter sees the long failures too. Where the engines keep the states, or
the drafter has no use for those of a step (`keep_states` False), none of that is done, and the report's figures are
those of the trained rollouts.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.config.policy import PolicyConfig
from services.core.protocols import Clock
from services.core.types import HiddenStateChunk, PolicyStepReport, TrainBatch
from services.models.finite import all_finite
from services.models.hidden import HiddenStates, chunk_of
from services.models.target import check_tensors
from services.policy.batch import AdmittedBatch, admit, split_updates
from services.policy.correction import correction
from services.policy.logprobs import Scorer, Scores
from services.policy.loss import kl_to_reference, policy_loss, token_weights
from services.policy.packs import Pack, make_packs
from services.policy.recompute import recompute_layers
from services.policy.residence import Residence
from services.policy.sharding import let_go, own, place, placed_like, shard, whole
from services.policy.surrogate import token_terms
from services.policy.tally import Tally
from services.policy.team import ALONE, Team


@dataclass(frozen=True)
class PolicyStep:
    report: PolicyStepReport
    chunk: HiddenStateChunk
    hidden: list[HiddenStates]


@dataclass
class _Prepared:
    """A pack with the reference's log-probabilities and, once known, the policy's own before the first update [N]."""

    pack: Pack
    ref: Tensor | None = None
    before: Tensor | None = None


@dataclass
class _FirstPass:
    """What a step's forward passes have told; `hidden` by the rollout's place in the batch, if they are to `keep`."""

    tally: Tally
    aux_layers: tuple[int, ...]
    keep: bool
    hidden: dict[int, HiddenStates] = field(default_factory=dict)

    def of(self, team: Team) -> _FirstPass:
        """With what the others' have told, for the worker that leads."""
        found = team.gathered((self.tally, self.hidden))
        if len(found) <= 1:
            return self
        hidden = {i: states for _, other in found for i, states in other.items()}
        return replace(self, tally=Tally.merged([tally for tally, _ in found]), hidden=hidden)


class PolicyTrainer:
    """Owns the policy's weights in float32 and AdamW's state. `compute` is the forward's dtype, None for float32;
    `aux_layers` are those whose outputs the drafter reads beside the last hidden state (EAGLE-3); without `keep_states`
    a step yields none. `away`: it begins with its memory released, see `residence`, and is built without ever having
    more than a part of the model on the device, which `model` is not on then.

    Of a `team` each worker has a trainer of its own and makes every call with the same arguments; `device` is where it
    computes. What a step yields is whole for the one that leads."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: PolicyConfig,
        clock: Clock,
        compute: torch.dtype | None = None,
        aux_layers: tuple[int, ...] = (),
        keep_states: bool = True,
        team: Team = ALONE,
        device: torch.device | None = None,
        away: bool = False,
    ) -> None:
        # eval: no dropout, or the trainer's logprobs would not be the engine's
        model.train(False)
        self.model = model
        self.config = config
        self.version = 0
        self.team = team
        self.device: torch.device = device or next(model.parameters()).device
        self._clock = clock
        self._state_dtype = compute or torch.float32  # as the engine has them: norms under autocast give float32
        self._autocast = compute if team.mesh is None else None  # sharded weights are gathered in that dtype
        self._aux_layers = aux_layers
        self._keep_states = keep_states
        self._scorer = Scorer(model)
        self._reference = Scorer(_frozen_copy(model)) if config.kl_coef > 0 else None
        if config.activation_checkpointing:
            recompute_layers(model)
        self.residence = Residence(self._tensors, self.device)
        placed = partial(_send, self.residence) if away else _stay
        for scorer in filter(None, (self._scorer, self._reference)):
            if team.mesh is not None:
                # behind the reference's forward pass comes no backward pass
                reshard = config.reshard_after_forward or scorer is self._reference
                shard(scorer, team, compute, placed, reshard)
            else:
                place(scorer, self.device, placed)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            _decay_groups(self._parameters, config.weight_decay), lr=config.learning_rate, betas=config.betas
        )
        if away:
            self.residence.leave()

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self._parameters[0].dtype

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Whole copies on the CPU, for the worker that leads: weights by `policy/NAME`, AdamW's state by
        `optimizer/KEY/NAME`."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            kept = {f"optimizer/{key}/{name}": v for key, v in self._optimizer.state.get(parameter, {}).items()}
            for path, value in {f"policy/{name}": parameter, **kept}.items():
                full = whole(self.residence.at_hand(value.detach()))
                if self.team.leads:
                    found[path] = full.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Adopt what `state` gave. Raises WeightError, nothing changed, when its weights are not exactly the model's.
        The reference model of the KL term stays the first policy."""
        named = dict(self.model.named_parameters())
        weights = {n.removeprefix("policy/"): t for n, t in state.items() if n.startswith("policy/")}
        check_tensors(weights, {name: tuple(p.shape) for name, p in named.items()}, "policy checkpoint")
        for name, parameter in named.items():
            there = self.residence.at_hand(parameter.detach())
            own(there).copy_(own(placed_like(there, weights[name])))
            kept = {
                n.split("/")[1]: t for n, t in state.items() if n.startswith("optimizer/") and n.endswith(f"/{name}")
            }
            if kept:
                # AdamW keeps its step count on the CPU, its moments where the weight is
                moments = {key: placed_like(parameter, t) for key, t in kept.items() if key != "step"}
                self._optimizer.state[parameter] = {"step": kept["step"].clone(), **moments}
                if self.residence.away:
                    self.residence.send(moments.values())
        self.version = version

    def train_step(self, batch: TrainBatch) -> PolicyStep:
        """One policy update. Raises BatchError for rollouts the policy must not learn from.

        With nothing to train on (every rollout dropped or without a signal) weights, optimizer and version stay.
        """
        started = self._clock()
        self._set_learning_rate(batch.step)
        work = admit(batch, self.model.config.vocab_size, self.config)
        parts, extra = self._packs(work)
        keep = self._keep_states and batch.keep_states
        first = _FirstPass(Tally(), self._aux_layers if keep else (), keep)
        prepared = [[_Prepared(pack, self._reference_logprobs(pack)) for pack in part] for part in parts]
        if first.keep:
            self._look(map(_Prepared, extra), first)
        if len(parts) > 1:
            self._look(itertools.chain.from_iterable(prepared), first)
        updated = False
        for part in prepared * self.config.inner_epochs:
            for one in part:
                self._learn(one, first)
            updated |= self._update(first.tally)
        before = self.version
        self.version += updated
        first = first.of(self.team)
        kept = [first.hidden[i] for i in sorted(first.hidden)]
        return PolicyStep(
            report=self._report(work, first.tally, bool(parts), self._clock() - started),
            chunk=chunk_of(kept, before, batch.step),
            hidden=kept,
        )

    def _tensors(self) -> Iterator[Tensor]:
        """All that is kept between steps; AdamW's step counts are on the CPU, and so small that they may stay there."""
        models = [self.model] if self._reference is None else [self.model, self._reference.model]
        for parameter in itertools.chain.from_iterable(model.parameters() for model in models):
            yield parameter
            yield from (v for key, v in self._optimizer.state.get(parameter, {}).items() if key != "step")

    def _set_learning_rate(self, step: int) -> None:
        """`step` counts from 1; by the step and not by the updates, so that a resumed run goes on where it was."""
        decay = self.config.decay_steps
        left = max(0.0, 1 - (step - 1) / decay) if decay else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * left

    def _packs(self, work: AdmittedBatch) -> tuple[list[list[Pack]], list[Pack]]:
        """(packs of the trained rollouts for each update, packs that only run forward). Each update's loss is a mean
        over its own part."""
        algorithm, parts = self.config.algorithm, []
        for part in split_updates(work, self.config.updates_per_step):
            inside = set(part)
            lengths = [len(r.response_ids) if i in inside else 0 for i, r in enumerate(work.rollouts)]
            weights = token_weights(lengths, algorithm.aggregation, algorithm.aggregation_constant)
            parts.append(self._make_packs(work, weights, part))
        left = [i for i, trained in enumerate(work.trained) if not trained]
        return parts, self._make_packs(work, [0.0] * len(work.rollouts), left)

    def _make_packs(self, work: AdmittedBatch, weights: Sequence[float], chosen: Sequence[int]) -> list[Pack]:
        budget, device, dtype, team = self.config.micro_batch_tokens, self.device, self.parameter_dtype, self.team
        rollouts, advantages = work.rollouts, work.advantages
        return make_packs(rollouts, advantages, weights, chosen, budget, device, dtype, team.rank, team.size)

    def _score(self, scorer: Scorer, pack: Pack, aux_layers: tuple[int, ...] = ()) -> Scores:
        enabled = self._autocast is not None
        with torch.autocast(self.device.type, dtype=self._autocast, enabled=enabled):
            scores: Scores = scorer(pack, aux_layers)
        if not torch.is_grad_enabled():
            let_go(scorer)
        return scores

    @torch.no_grad()
    def _reference_logprobs(self, pack: Pack) -> Tensor | None:
        return None if self._reference is None else self._score(self._reference, pack).full_logprobs

    def _learn(self, one: _Prepared, first: _FirstPass) -> None:
        """Forward and backward of one micro-batch; gradients add up in the parameters."""
        pack, fresh = one.pack, one.before is None
        scores = self._score(self._scorer, pack, first.aux_layers if fresh else ())
        if fresh:
            self._collect(one, scores, first)
        assert one.before is not None
        mask, correct = (scores.logprobs > -torch.inf) & (one.before > -torch.inf), self.config.correction
        old, weights = pack.rollout_logprobs, pack.weights
        if correct is not None:
            old, found = one.before, correction(one.before, pack.rollout_logprobs, mask, pack.segments, correct)
            weights = weights * found.weights
            first.tally.add_correction(found)
        terms = token_terms(self.config.algorithm, scores.logprobs, old, pack.advantages, mask, pack.segments)
        if one.ref is not None:
            terms = replace(terms, kl=kl_to_reference(scores.full_logprobs, one.ref, mask, self.config.kl_estimator))
        loss = policy_loss(terms, weights, mask, self.config.kl_coef)
        loss.backward()
        first.tally.add_loss(loss.detach(), terms, mask)

    @torch.no_grad()
    def _look(self, packs: Iterable[_Prepared], first: _FirstPass) -> None:
        """Forward alone, before any update."""
        for one in packs:
            self._collect(one, self._score(self._scorer, one.pack, first.aux_layers), first)

    def _collect(self, one: _Prepared, scores: Scores, first: _FirstPass) -> None:
        """Keep what the first forward pass tells; the hidden states cut into sequences, on the CPU, free of the graph
        and of the pack's memory."""
        pack, one.before = one.pack, scores.logprobs.detach()
        first.tally.add_scores(scores, pack.rollout_logprobs)
        if not first.keep:
            return
        states = scores.hidden.detach().to(self._state_dtype).cpu()
        aux = None if scores.aux is None else scores.aux.to(self._state_dtype).cpu()
        ids = pack.ids.cpu()
        places = zip(pack.members, pack.lengths, pack.prompt_lengths, pack.layout.starts, strict=True)
        for i, length, prompt, (row, column) in places:
            place = (row, slice(column, column + length))
            own = states[place].clone()
            own_aux = None if aux is None else aux[place].clone()
            if not all(all_finite(t) for t in (own, own_aux) if t is not None):
                first.tally.bad_hidden += 1
                continue
            mask = torch.arange(length) >= prompt
            first.hidden[i] = HiddenStates(ids[place].clone(), own, mask, self.version, own_aux)

    def _update(self, tally: Tally) -> bool:
        """Clip and step; a non-finite gradient changes nothing and is reported."""
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.grad_clip)))
        tally.grad_norms.append(norm)
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return math.isfinite(norm)

    def _report(self, work: AdmittedBatch, tally: Tally, trained: bool, busy_s: float) -> PolicyStepReport:
        warnings = list(work.warnings)
        if not trained:
            warnings.append("no rollout carries a learning signal: loss 0, policy left as it is")
        warnings += tally.warnings()
        return PolicyStepReport(
            policy_version=self.version,
            loss=tally.mean_loss,
            grad_norm=tally.grad_norm,
            kl=tally.kl,
            clip_fraction=tally.clip_fraction,
            logprob_gap=tally.logprob_gap,
            mismatch_kl=tally.mismatch_kl,
            corrected_fraction=tally.corrected_fraction,
            entropy=tally.entropy,
            surprise=tally.surprise,
            surprise_errors=tally.surprise_errors,
            num_tokens=sum(len(r.response_ids) for r, t in zip(work.rollouts, work.trained, strict=True) if t),
            zero_variance_fraction=work.zero_variance_fraction,
            warnings=tuple(warnings),
            busy_s=busy_s,
        )


def _decay_groups(parameters: Sequence[torch.nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Weight decay pulls matrices only; norms and biases are left alone."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _send(residence: Residence, module: nn.Module) -> None:
    residence.send(module.parameters())


def _stay(module: nn.Module) -> None: ...


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    frozen = copy.deepcopy(model)
    frozen.requires_grad_(False)
    return frozen
