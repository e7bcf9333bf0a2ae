"""What the API answers. Every number that a run did not measure is null; seconds are since the start of the run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["starting", "running", "paused", "silent", "finished", "stopped", "failed"]
RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,149}$")]


class Answer(BaseModel):
    """Rows of a run folder may have more fields than these, of another version of Longtail."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Problem(Answer):
    """What went wrong and what to do about it."""

    detail: str


class RunEntry(Answer):
    """One run in the list. `silent`: it neither ended nor gave a sign of life lately; its process was killed, or it
    runs on a machine whose clock or file system is far off."""

    run_id: RunId
    name: str
    status: Status
    started_at: str
    steps_done: int
    num_steps: int | None


class RunList(Answer):
    """Newest first."""

    runs: tuple[RunEntry, ...]
    control: bool = Field(description="Whether this server takes control requests at all.")


class Control(Answer):
    paused: bool = False
    forced: str | None = Field(None, description="A strategy's name in place of the selector's choice.")


class Event(Answer):
    at_s: float
    kind: str
    subject: str
    message: str


class Progress(Answer):
    """What the run did when it last said so."""

    phase: str
    step: int
    num_steps: int
    rollouts_done: int
    rollouts_total: int
    rollouts_running: int
    tokens_per_s: float | None
    acceptance_length: float | None
    reward_mean: float | None
    heldout_reward: float | None
    policy_version: int
    drafter_version: int
    slots: dict[str, str]
    at_s: float = 0.0
    phase_at_s: float = 0.0
    control: Control = Control()


class Totals(Answer):
    """Sums and last values over the steps that were recorded."""

    rollouts: int
    response_tokens: int
    rollout_s: float
    idle_s: float
    drafting_s: float
    reward_mean: float | None
    heldout_reward: float | None
    acceptance_length: float | None
    policy_version: int
    drafter_version: int


class RunDetail(Answer):
    """A run now. `now_s`: how old the run is, or became. The counts are cursors: ask for rows from there on."""

    run_id: RunId
    name: str
    status: Status
    started_at: str
    error: str | None
    now_s: float
    last_sign_s: float | None = Field(description="Seconds since the last sign of life; null: it gave none.")
    progress: Progress | None
    totals: Totals
    strategies: tuple[str, ...] = Field(description="Names that the control request `selector` takes.")
    num_steps_done: int
    num_evaluations: int
    num_spans: int
    num_events: int
    unreadable_lines: int
    has_report: bool


class Step(Answer):
    step: int
    at_s: float
    reward_mean: float | None
    correct_fraction: float | None
    num_rollouts: int
    num_groups: int
    response_tokens: int
    response_len_p50: float | None
    response_len_p99: float | None
    response_len_max: int
    truncated_fraction: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    acceptance_length_live_offline: float | None
    acceptance_length_frozen_offline: float | None
    steps_by_strategy: dict[str, int]
    policy_version: int
    drafter_version: int
    policy_loss: float | None
    kl: float | None
    entropy: float | None
    drafter_loss: float | None
    drafter_micro_steps: int
    rollout_s: float | None
    reward_s: float | None
    policy_s: float | None
    publish_s: float | None
    idle_s: float | None
    drafting_s: float | None
    energy_j: dict[str, float | None] | None = None
    predicted_gain: float | None = None
    achieved_gain: float | None = None


class Steps(Answer):
    """`next` is the cursor for the request after this one."""

    items: tuple[Step, ...]
    next: int


class Evaluation(Answer):
    step: int
    at_s: float
    num_prompts: int
    num_rollouts: int
    reward_mean: float | None
    correct_fraction: float | None


class Evaluations(Answer):
    items: tuple[Evaluation, ...]
    next: int


class Span(Answer):
    slot: str
    role: str
    start_s: float
    end_s: float
    label: str = ""


class OpenSpan(Answer):
    """What a slot does now; it has no end yet."""

    slot: str
    role: str
    start_s: float


class Spans(Answer):
    items: tuple[Span, ...]
    next: int
    open: tuple[OpenSpan, ...]


class StrategyStretch(Answer):
    """A line of strategies.jsonl."""

    slot: str
    label: str
    strategy: str
    reason: str
    start_s: float
    end_s: float
    rounds: int
    rounds_s: float
    verify_steps: int
    tokens: int
    running_first: int
    running_last: int
    on_s: float | None = None
    off_s: float | None = None


class StrategyBucket(Answer):
    """Rounds with so many requests running at a server, and each strategy's share of them."""

    running: str
    rounds: int
    share: dict[str, float]


class Strategies(Answer):
    """Which strategy ran and why, over the latest stretches of the run: in words, and by running requests."""

    sentences: tuple[str, ...]
    buckets: tuple[StrategyBucket, ...]


class Events(Answer):
    items: tuple[Event, ...]
    next: int


class LengthBin(Answer):
    """Responses of `low` to `high` tokens, both included."""

    low: int
    high: int
    count: int
    truncated: int


class Lengths(Answer):
    """Response lengths of one step's rollouts; `step` null: no step has any yet."""

    step: int | None
    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    longest: int | None
    bins: tuple[LengthBin, ...]


class Version(Answer):
    """From this step on (0: before the first), this version is published."""

    step: int
    at_s: float
    version: int


class Versions(Answer):
    policy: tuple[Version, ...]
    drafter: tuple[Version, ...]


class SelectorRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: str | None = Field(
        max_length=100, description="One of the run's `strategies`; null gives the choice back to the selector."
    )


class ControlAnswer(Answer):
    """The request was taken and is obeyed later; the run's events tell when."""

    run_id: RunId
    action: Literal["pause", "resume", "checkpoint", "stop", "selector"]
    message: str
