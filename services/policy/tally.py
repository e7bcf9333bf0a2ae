"""Sums over the micro-batches of one train_step, and the alarms read from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from services.policy.correction import Correction
from services.policy.logprobs import Scores
from services.policy.surrogate import MAX_LOG_RATIO, TokenTerms

GAP_ALARM = 0.05  # nats; float32 noise between engine and trainer is below 1e-4
# Nats per token, and standard errors. Sampling from the policy of the step before gives about a thousandth.
SURPRISE_ALARM, SURPRISE_ERRORS = 0.05, 6.0


@dataclass
class Tally:
    loss: float = 0.0
    kl_sum: float = 0.0
    clipped: int = 0
    loss_tokens: int = 0
    gap_sum: float = 0.0
    gap_tokens: int = 0
    mismatch_sum: float = 0.0
    corrected: int = 0
    entropy_sum: float = 0.0
    surprise_sum: float = 0.0
    spread_sum: float = 0.0
    scored_tokens: int = 0
    excluded_tokens: int = 0
    bad_hidden: int = 0
    grad_norms: list[float] = field(default_factory=list)

    @classmethod
    def merged(cls, tallies: Sequence[Tally]) -> Tally:
        """Of workers that ran parts of the same updates: their gradients, and so the norms, are common to them."""
        counts = [f.name for f in fields(cls) if f.name != "grad_norms"]
        sums = {name: sum(getattr(tally, name) for tally in tallies) for name in counts}
        return cls(**sums, grad_norms=list(tallies[0].grad_norms))

    @property
    def mean_loss(self) -> float:
        """Over the updates."""
        return self.loss / len(self.grad_norms) if self.grad_norms else 0.0

    def add_loss(self, loss: Tensor, terms: TokenTerms, mask: Tensor) -> None:
        self.loss += float(loss)
        self.kl_sum += float(terms.kl.detach().sum())
        self.clipped += int(terms.clipped.sum())
        self.loss_tokens += int(mask.sum())

    def add_correction(self, correction: Correction) -> None:
        self.corrected += int(correction.cut.sum())

    def add_scores(self, scores: Scores, rollout_logprobs: Tensor) -> None:
        """Of the first forward pass, before any update."""
        logprobs = scores.logprobs.detach()
        finite = logprobs.isfinite()
        gap = (logprobs - rollout_logprobs)[finite]
        self.gap_sum += float(gap.abs().sum())
        self.mismatch_sum += float((gap.clamp_max(MAX_LOG_RATIO).exp() - 1 - gap).sum())
        self.gap_tokens += int(finite.sum())
        self.excluded_tokens += int((~finite).sum())
        self.entropy_sum += float(scores.entropy.sum())
        self.surprise_sum -= float((logprobs + scores.entropy)[finite].sum())
        self.spread_sum += float(scores.spread[finite].sum())
        self.scored_tokens += int(logprobs.shape[0])

    @property
    def kl(self) -> float:
        return self.kl_sum / self.loss_tokens if self.loss_tokens else 0.0

    @property
    def clip_fraction(self) -> float:
        return self.clipped / self.loss_tokens if self.loss_tokens else 0.0

    @property
    def logprob_gap(self) -> float:
        return self.gap_sum / self.gap_tokens if self.gap_tokens else 0.0

    @property
    def mismatch_kl(self) -> float:
        """k3 estimate of KL(engine || trainer) per token, before the update."""
        return self.mismatch_sum / self.gap_tokens if self.gap_tokens else 0.0

    @property
    def corrected_fraction(self) -> float:
        return self.corrected / self.loss_tokens if self.loss_tokens else 0.0

    @property
    def entropy(self) -> float:
        return self.entropy_sum / self.scored_tokens if self.scored_tokens else 0.0

    @property
    def surprise(self) -> float:
        """Mean of -log p of a token minus its expectation, the entropy, in nats per token. Whatever was drawn before,
        the expectation of this is 0 for a token that was drawn from the policy, so over a step it is 0 within its
        standard error: unless something else chose the tokens."""
        return self.surprise_sum / self.gap_tokens if self.gap_tokens else 0.0

    @property
    def surprise_errors(self) -> float:
        """`surprise` in standard errors (the differences are a martingale's, so their variances add up)."""
        return self.surprise_sum / math.sqrt(self.spread_sum) if self.spread_sum else 0.0

    @property
    def grad_norm(self) -> float:
        """Mean over the updates, before clipping."""
        return sum(self.grad_norms) / len(self.grad_norms) if self.grad_norms else 0.0

    def warnings(self) -> list[str]:
        found = []
        if self.logprob_gap > GAP_ALARM:
            found.append(
                f"logprob_gap {self.logprob_gap:.3f} nats > {GAP_ALARM}: engine and trainer do not compute the same "
                "distribution (stale weights in the engine, or another sampling convention)"
            )
        if abs(self.surprise) > SURPRISE_ALARM and abs(self.surprise_errors) > SURPRISE_ERRORS:
            found.append(
                f"surprise {self.surprise:+.3f} nats a token, {abs(self.surprise_errors):.0f} standard errors: "
                "responses were not drawn from the policy, so what is learned from them is wrong (speculation that is "
                "not lossless, or weights in the engine that are not the policy's): compare a run with OFF, "
                "speculation.selector={type: fixed}"
            )
        if self.excluded_tokens:
            found.append(
                f"{self.excluded_tokens} of {self.scored_tokens} tokens lie outside the trainer's top-k/top-p/min-p "
                "set and were masked out"
            )
        if self.bad_hidden:
            found.append(f"hidden states of {self.bad_hidden} rollouts are not finite: kept from the drafter")
        bad = sum(not math.isfinite(n) for n in self.grad_norms)
        if bad:
            found.append(f"{bad} of {len(self.grad_norms)} updates skipped: the gradient was not finite")
        return found
