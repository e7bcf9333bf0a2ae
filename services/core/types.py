"""The records that slices exchange, in lifecycle order. Reading top to bottom is reading the data flow.

All are frozen and hold plain Python values only (ids, counts, versions, floats): tensors travel by reference, see
`services.core.protocols.Blob`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from services.core.acceptance import AcceptanceStats as AcceptanceStats  # noqa: PLC0414
from services.core.buffer import BufferView as BufferView  # noqa: PLC0414
from services.core.packed import kept_ids, kept_logprobs
from services.core.partial import PartialRollout as PartialRollout  # noqa: PLC0414
from services.core.pickled import pickled_by_call
from services.core.spans import SlotSpan as SlotSpan  # noqa: PLC0414
from services.core.spans import StrategySpan as StrategySpan  # noqa: PLC0414
from services.core.view import ControlState as ControlState  # noqa: PLC0414
from services.core.view import ProgressView as ProgressView  # noqa: PLC0414
from services.core.view import RunEvent as RunEvent  # noqa: PLC0414

# ---------------------------------------------------------------------------- prompts and work


@pickled_by_call
@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. `id` is a hash of task and text, so equal prompts have equal ids across runs and files."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    task: str
    meta: Mapping[str, Any] = field(default_factory=dict)


COLDEST = 1e-5  # the least temperature above 0: logits are divided by it in float32, where 1e-46 is 0


@pickled_by_call
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are drawn. `top_k` 0 and `top_p` 1.0 and `min_p` 0.0 mean off; temperature 0 is greedy, and nothing
    lies between it and COLDEST."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@pickled_by_call
@dataclass(frozen=True, slots=True)
class GroupWork:
    """The unit handed to a rollout server: some or all rollouts of one prompt, sharing one prefill.

    `indices[i]` in [0, group_size) with `seeds[i]` names each rollout; a re-dispatch after a loss carries the missing
    indices only. `keep_states`: the engine keeps the target's hidden states of these rollouts for the drafter.
    `partials`: those of the rollouts that another server began; they are continued, the others begin.
    """

    group_id: str
    prompt: Prompt
    indices: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParams
    keep_states: bool = False
    partials: tuple[PartialRollout, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.indices) == len(self.seeds) > 0
        assert len(set(self.indices)) == len(self.indices)
        begun = [p.index for p in self.partials]
        assert len(set(begun)) == len(begun) and set(begun) <= set(self.indices), "one partial of each rollout"
        assert all(p.group_id == self.group_id for p in self.partials)

    def partial(self, index: int) -> PartialRollout | None:
        """What there is already of the rollout `index`; None: it begins here."""
        return next((p for p in self.partials if p.index == index), None)

    def subset(self, keep: Collection[int]) -> GroupWork:
        """The part of the work with these indices, in the work's order."""
        pairs = [(i, s) for i, s in zip(self.indices, self.seeds, strict=True) if i in keep]
        begun = tuple(p for p in self.partials if p.index in keep)
        return replace(self, indices=tuple(i for i, _ in pairs), seeds=tuple(s for _, s in pairs), partials=begun)


# ---------------------------------------------------------------------------- responses and rollouts


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@pickled_by_call
@dataclass(frozen=True, slots=True)
class Rollout:
    """One prompt + one response + logprobs + versions. Ids and log probabilities may be given as any sequence and are
    kept packed, equal to the tuple of them; a simulation gives ranges, which are kept as they are.

    `rollout_logprobs`: one entry per token of `response_ids`, natural log under the *processed* target distribution
    (temperature, top-k, top-p, min-p applied, in this order; a greedy token has 0.0); `logprob_convention` says so.
    `text`: `decode(response_ids)`, cut before a matched stop string (training uses ids). Versions in order of serving.
    """

    group_id: str
    prompt_id: str
    index: int
    seed: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    rollout_logprobs: Sequence[float]
    text: str
    finish_reason: FinishReason
    sampling: SamplingParams
    policy_versions: tuple[int, ...]
    drafter_versions: tuple[int, ...]
    acceptance: AcceptanceStats
    server: str = ""
    started_s: float = 0.0
    finished_s: float = 0.0
    logprob_convention: str = "processed"

    def __post_init__(self) -> None:
        assert len(self.rollout_logprobs) == len(self.response_ids), "one logprob per emitted token"
        object.__setattr__(self, "prompt_ids", kept_ids(self.prompt_ids))
        object.__setattr__(self, "response_ids", kept_ids(self.response_ids))
        object.__setattr__(self, "rollout_logprobs", kept_logprobs(self.rollout_logprobs))

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}#{self.index}"


@pickled_by_call
@dataclass(frozen=True, slots=True)
class RunningRequest:
    """What a rollout server tells about one request that is still generating."""

    rollout_id: str
    num_tokens: int
    acceptance: AcceptanceStats


@pickled_by_call
@dataclass(frozen=True, slots=True)
class ServedVersions:
    """Versions an engine serves right now, reported by the engine itself; None before the first load."""

    policy: int | None
    drafter: int | None


@dataclass(frozen=True, slots=True)
class MemorySwitch:
    """Releasing or resuming a server's GPU memory: seconds, and bytes that changed hands."""

    released: bool
    seconds: float
    num_bytes: int


@pickled_by_call
@dataclass(frozen=True, slots=True)
class ServerReport:
    """Answer of a rollout server to one `advance`: what finished since the last report and what still runs.
    Prefills that ended since then had `prefill_tokens` and took at most `prefill_s`; `memory_switches` were made;
    `spans` tell which strategies ran since then."""

    finished: tuple[Rollout, ...]
    running: tuple[RunningRequest, ...]
    waiting: int
    new_tokens: int
    busy_s: float
    strategy: str
    versions: ServedVersions
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    memory_switches: tuple[MemorySwitch, ...] = ()
    spans: tuple[StrategySpan, ...] = ()


# ---------------------------------------------------------------------------- rewards and groups


@pickled_by_call
@dataclass(frozen=True, slots=True)
class Reward:
    """Scalar from a verifier. `error` is set when the verifier failed: an error is not a wrong answer."""

    value: float
    correct: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """All `group_size` rollouts of one prompt with their rewards, in index order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]

    def __post_init__(self) -> None:
        assert len(self.rollouts) == len(self.rewards)
        assert [r.index for r in self.rollouts] == list(range(len(self.rollouts)))


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Rollouts of one step with one advantage each (group-relative credit), ready for the policy trainer.
    `keep_states`: the drafter has a use for this step's hidden states."""

    step: int
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]
    keep_states: bool = True

    def __post_init__(self) -> None:
        assert len(self.rollouts) == len(self.advantages)


@dataclass(frozen=True, slots=True)
class PolicyStepReport:
    """Scalars of one policy train_step. `policy_version` is the version after the step."""

    policy_version: int
    loss: float
    grad_norm: float
    kl: float
    clip_fraction: float
    logprob_gap: float  # mean |policy_logprobs - rollout_logprobs| before the update, in nats: a mismatch alarm
    mismatch_kl: float  # KL(engine || trainer) per token before the update, k3 estimate
    corrected_fraction: float  # of the loss's tokens: importance weight bounded, or masked out by it
    entropy: float
    surprise: float  # nats per token beyond the entropy; 0 within its error for responses drawn from the policy
    surprise_errors: float  # the same in standard errors
    num_tokens: int
    zero_variance_fraction: float
    warnings: tuple[str, ...]
    busy_s: float


# ---------------------------------------------------------------------------- drafter


@dataclass(frozen=True, slots=True)
class HiddenStateChunk:
    """Handle of hidden states that stay where they are; the `Blob` beside it resolves to them. `num_missing` rollouts
    came without their states, or with the first part of them; `lost_bytes` found no room in an engine's buffer."""

    policy_version: int
    step: int
    num_sequences: int
    num_tokens: int
    num_bytes: int
    num_missing: int = 0
    lost_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DrafterProgress:
    """What one `train` call of a drafter trainer did, and its `buffer` afterwards. `expected_acceptance[k]` is the mean
    sum of min(target_probs, draft_probs) at draft depth k + 1."""

    micro_steps: int
    total_steps: int
    num_tokens: int
    loss: float
    expected_acceptance: tuple[float, ...]
    busy_s: float
    buffer: BufferView | None = None


@dataclass(frozen=True, slots=True)
class AcceptanceEstimate:
    """Offline, teacher-forced acceptance of one drafter on given rollouts. `per_depth[k]`: mean sum of
    min(target_probs, draft_probs) at depth k + 1; `acceptance_length`: the expected tokens per verify step of a chain
    of that depth, bonus included."""

    drafter: str
    per_depth: tuple[float, ...]
    acceptance_length: float
    num_tokens: int


# ---------------------------------------------------------------------------- slots


class SlotState(StrEnum):
    ROLLOUT = "rollout"
    DRAINING = "draining"
    IDLE = "idle"
    DRAFTING = "drafting"
    POLICY = "policy"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SlotLease:
    """Who may use a GPU slot. `epoch` grows with every change of holder; `deadline_s` is renewed by heartbeats."""

    slot: int
    state: SlotState
    epoch: int
    deadline_s: float


# ---------------------------------------------------------------------------- what the run folder and the display get


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of `metrics.jsonl`. Seconds are wall clock; idle and drafting seconds are summed over slots. Groups,
    rollouts and their rewards are all that were sampled, in `sampling_rounds`; `dropped_groups` were not trained on."""

    step: int
    at_s: float
    reward_mean: float
    correct_fraction: float
    num_rollouts: int
    num_groups: int
    response_tokens: int
    response_len_p50: float
    response_len_p99: float
    response_len_max: int
    truncated_fraction: float
    zero_variance_fraction: float
    reward_errors: int
    acceptance_length: float | None
    acceptance_rate: float | None
    acceptance_length_live_offline: float | None
    acceptance_length_frozen_offline: float | None
    steps_by_strategy: Mapping[str, int]
    policy_version: int
    drafter_version: int
    policy_loss: float
    grad_norm: float
    kl: float
    entropy: float
    surprise: float
    surprise_errors: float
    logprob_gap: float
    mismatch_kl: float
    corrected_fraction: float
    drafter_loss: float | None
    drafter_micro_steps: int
    rollout_s: float
    reward_s: float
    policy_s: float
    publish_s: float
    idle_s: float
    drafting_s: float
    warnings: tuple[str, ...] = ()
    energy_j: Mapping[str, float] | None = None  # joules of the step's GPUs by role; None: not measured
    predicted_gain: float | None = None  # how many times as long its rounds would take with OFF, predicted before it
    achieved_gain: float | None = None  # the same, of the rounds as they came
    dropped_groups: int = 0
    sampling_rounds: int = 1


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Held-out evaluation at the run's temperature."""

    step: int
    at_s: float
    num_prompts: int
    num_rollouts: int
    reward_mean: float
    correct_fraction: float
