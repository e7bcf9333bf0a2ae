"""The configuration section `policy`: the algorithm by name, and how the trainer runs it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.config.section import Section

Aggregation = Literal["token", "sequence", "constant"]
Baseline = Literal["standardised", "mean", "leave_one_out"]


class OverlongConfig(Section):
    """Soft punishment of length (DAPO, equation 13): over the last `buffer_tokens` before rollout.sampling.max_tokens
    the reward falls linearly, by `penalty` at the end."""

    buffer_tokens: int = Field(ge=1)
    penalty: float = Field(1.0, gt=0)


class DynamicSampling(Section):
    """Groups without a signal are replaced by further prompts (DAPO, section 3.2), in at most `max_rounds` rounds of a
    step, the first one included. What is missing then is filled up with groups that have none."""

    max_rounds: int = Field(3, ge=2)


class _Algorithm(Section):
    """`baseline`: how a group's rewards become advantages. `aggregation`: what a batch's loss is a mean over, see
    services/policy/loss.py; `aggregation_constant`: its divisor for "constant". `overlong`: shaping of the rewards.
    `dynamic_sampling` None: a step trains on the groups of its own prompts, whatever their rewards are."""

    baseline: Baseline = "standardised"
    aggregation: Aggregation = "sequence"
    aggregation_constant: float = Field(512.0, gt=0)
    overlong: OverlongConfig | None = None
    dynamic_sampling: DynamicSampling | None = None


class _Clipped(_Algorithm):
    clip_low: float = Field(0.2, gt=0, le=1)
    clip_high: float = Field(0.2, gt=0)


class Grpo(_Clipped):
    """Group Relative Policy Optimization (Shao et al. 2024)."""

    type: Literal["grpo"] = "grpo"


class DrGrpo(_Clipped):
    """GRPO without its two biases (Liu et al. 2025): no division by the group's deviation, none by the length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    baseline: Baseline = "mean"
    aggregation: Aggregation = "constant"


class Dapo(_Clipped):
    """Decoupled clip and token-level loss (Yu et al. 2025). Its length punishment is `overlong`, its
    sampling `dynamic_sampling`."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, gt=0)
    aggregation: Aggregation = "token"


class Gspo(_Clipped):
    """Group Sequence Policy Optimization (Zheng et al. 2025): one ratio per response, the geometric mean of its
    tokens', clipped far more narrowly."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, le=1)
    clip_high: float = Field(4e-4, gt=0)


class Cispo(_Clipped):
    """Clipped importance-sampling weights (MiniMax-M1, 2025): every token keeps its gradient, its weight is bounded.
    clip_low 1 is no bound below, as in the paper."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0, le=1)
    clip_high: float = Field(0.28, gt=0)
    aggregation: Aggregation = "token"


class Rloo(_Algorithm):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024): a response is one action, its log-probability the
    sum over its tokens. `aggregation_constant` 1 is the paper's scale."""

    type: Literal["rloo"] = "rloo"
    baseline: Baseline = "leave_one_out"
    aggregation: Aggregation = "constant"
    aggregation_constant: float = Field(1.0, gt=0)


Algorithm = Annotated[Grpo | DrGrpo | Dapo | Gspo | Cispo | Rloo, Field(discriminator="type")]


class CorrectionConfig(Section):
    """Importance weights for engines whose log-probabilities differ from the trainer's: trainer / engine, of each
    token, of the whole response ("sequence": the product of its tokens'), or its geometric mean. `truncate`: at most
    `high` (Yao et al. 2025); `mask`: tokens, or responses, outside [low, high] take no part (Ling Team 2025,
    "IcePop")."""

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    low: float = Field(0.5, ge=0)
    high: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _bounds(self) -> CorrectionConfig:
        if not self.low < 1 < self.high:
            raise ValueError(
                f"low {self.low:g} and high {self.high:g} must lie on the two sides of 1, which is no error"
            )
        return self


class PolicyConfig(Section):
    """`updates_per_step`: optimizer steps over parts of the batch, `inner_epochs`: passes over all of it.
    `correction` None: the ratio of the algorithm is taken against the engine's log-probabilities, so that clipping
    bounds the mismatch as well; otherwise against the trainer's own before the step, and the mismatch is corrected.
    `kl_estimator`: Schulman's k1, k2, k3; the gradient of k2 is that of the KL divergence. `truncated` "mask":
    responses cut off by max_tokens keep their place in the group, and take no part in the loss.

    `activation_checkpointing`: a layer's activations are computed again in the backward pass, which is slower and takes
    a fraction of the memory. `reshard_after_forward` false: of several workers each keeps the weights that it gathered
    for the forward pass until the backward pass, 2 bytes for each in bfloat16, instead of gathering them again.
    `optimizer_offload`: between steps the weights in float32 and AdamW's state lie in host memory, where the update is
    computed too."""

    learning_rate: float = Field(1e-4, gt=0)
    decay_steps: int = Field(0, ge=0)  # the learning rate falls linearly to zero over so many steps; 0: constant
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    grad_clip: float = Field(1.0, gt=0)
    algorithm: Algorithm = Grpo()
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    correction: CorrectionConfig | None = None
    zero_variance: Literal["skip", "keep"] = "skip"
    truncated: Literal["keep", "mask"] = "keep"
    inner_epochs: int = Field(1, ge=1)
    updates_per_step: int = Field(1, ge=1)
    micro_batch_tokens: int = Field(4096, ge=64)
    activation_checkpointing: bool = False
    reshard_after_forward: bool = True
    optimizer_offload: bool = False
    threads: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _on_policy(self) -> PolicyConfig:
        if isinstance(self.algorithm, Rloo) and self.inner_epochs * self.updates_per_step > 1:
            raise ValueError("rloo has no ratio and learns on-policy only: set inner_epochs and updates_per_step to 1")
        return self
