"""From what a run tells to the values of its metrics: a RunObserver, and the Telemetry of the coordinator's parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from prometheus_client.metrics_core import Metric as Family

from services.config.schema import ClusterConfig
from services.coordinator.telemetry.acceptance import AcceptanceGrowth, growth
from services.coordinator.telemetry.facts import Weights
from services.coordinator.telemetry.labels import CAUSES, HOLDERS, PARTS, PHASES, STATES, LabelValues, slot_name
from services.coordinator.telemetry.slots import FREE, SlotTimes, WorkTimes
from services.coordinator.telemetry.values import State, Values
from services.core.protocols import Blob, Clock
from services.core.types import (
    DrafterProgress,
    EvalResult,
    Group,
    HiddenStateChunk,
    MemorySwitch,
    ProgressView,
    RunEvent,
    ServerReport,
    SlotLease,
    SlotSpan,
    SlotState,
    StepMetrics,
    StrategySpan,
)

SizeOf = Callable[[Weights, Blob], int | None]
F = TypeVar("F", bound=Callable[..., Any])


def _locked(method: F) -> F:
    @wraps(method)
    def call(self: RunMetrics, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(F, call)


class RunMetrics:
    """Told from the coordinator's thread; `read` may come from another. `clock` is the coordinator's; `wall_clock`
    gives Unix time. `size_of` tells the bytes behind a published version, None where the transport cannot say.
    `earlier`: values of the same run that are counted on; `took_over`: from a coordinator that died."""

    def __init__(
        self,
        config: ClusterConfig,
        run_id: str,
        clock: Clock,
        size_of: SizeOf,
        earlier: State | None = None,
        took_over: bool = False,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._lock = threading.RLock()
        self._clock, self._wall_clock, self._size_of = clock, wall_clock, size_of
        self._labels = labels = LabelValues(config)
        self._starts, self._buckets = labels.bucket_starts, labels.series(("bucket",))
        self._values = v = Values(labels, run_id)
        self._growth = AcceptanceGrowth()
        self._phase = "starting"
        self._drafting_slots: dict[int, Mapping[str, int]] = {}  # what each trainer's buffer had lost when last told
        if earlier is not None:
            v.put_back(earlier)
        self._newest_version = self._trained_version = int(v.total("longtail_published_version", "policy"))
        v.inc("longtail_coordinator_restarts_total", took_over)
        v.set("longtail_run_info", 1, config.run.name)
        v.set("longtail_planned_steps", config.run.steps)
        self._times = SlotTimes(config.rollout.num_servers, clock(), self._spent, self._window)
        self._work = WorkTimes(self._worked)
        for slot in range(config.rollout.num_servers):
            v.set("longtail_gpus", config.placement.gpus_per_slot, slot_name(slot))
        v.set("longtail_policy_gpus", config.placement.policy_workers * config.placement.policy_gpus)
        for slot in range(config.rollout.num_servers):
            self._show_state(slot)
        self._show_phase("starting")

    # ------------------------------------------------------------------ reading

    @_locked
    def read(self) -> State:
        """All values up to now."""
        self._tick()
        self._values.set("longtail_read_timestamp_seconds", self._wall_clock())
        return self._values.take()

    def families(self, state: State) -> list[Family]:
        """What `read` gave, to be shown. Takes a quarter of a second with a thousand slots: not under the lock."""
        return self._values.families(state)

    # ------------------------------------------------------------------ as an observer

    @_locked
    def step(self, metrics: StepMetrics) -> None:
        v = self._values
        v.inc("longtail_steps_total", 1)
        for part in PARTS:
            v.inc("longtail_step_part_seconds_total", max(0.0, getattr(metrics, f"{part}_s")), part)
        v.inc("longtail_reward_errors_total", metrics.reward_errors)
        v.inc("longtail_groups_total", metrics.num_groups - metrics.dropped_groups, "trained")
        v.inc("longtail_groups_total", metrics.dropped_groups, "dropped")
        for role, joules in (metrics.energy_j or {}).items():
            v.inc("longtail_energy_joules_total", max(0.0, joules), role)
        for name, value in _step_gauges(metrics).items():
            if value is not None:
                v.set(f"longtail_{name}", value)
        # The step's rollouts, told next, trained the version before this one (the same, when nothing had a signal).
        self._trained_version = self._newest_version
        self._newest_version = metrics.policy_version
        for stat in ("p50", "p99", "max"):
            v.set("longtail_step_response_tokens", getattr(metrics, f"response_len_{stat}"), stat)
        for drafter in ("live", "frozen"):
            offline = getattr(metrics, f"acceptance_length_{drafter}_offline")
            if offline is not None:
                v.set("longtail_offline_acceptance_length", offline, drafter)

    @_locked
    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        rollouts = [r for group in groups for r in group.rollouts]
        for rollout in rollouts:
            self._values.inc("longtail_rollouts_finished_total", 1, rollout.finish_reason.value)
            self._values.observe("longtail_response_tokens", len(rollout.response_ids))
        oldest = min((v for r in rollouts for v in r.policy_versions), default=self._trained_version)
        self._values.set("longtail_rollout_staleness", self._trained_version - oldest)

    @_locked
    def evaluation(self, result: EvalResult) -> None:
        self._values.set("longtail_heldout_reward", result.reward_mean)

    @_locked
    def span(self, span: SlotSpan) -> None:
        if span.slot in HOLDERS:
            self._work.end(span.slot, span.end_s - span.start_s)

    def strategy(self, span: StrategySpan) -> None:
        """Counted with the report that brought it."""

    @_locked
    def event(self, event: RunEvent) -> None:
        self._values.inc("longtail_events_total", 1, self._labels.known("kind", event.kind))

    @_locked
    def progress(self, view: ProgressView) -> None:
        v = self._values
        if view.phase != self._phase:
            self._tick()  # what has been belongs to the phase before
            self._growth.forget()
            self._show_phase(view.phase)
            if view.phase in HOLDERS:
                self._work.begin(view.phase, self._clock())
        v.set("longtail_step", view.step)
        v.set("longtail_rollouts", view.rollouts_running, "running")
        queued = view.rollouts_total - view.rollouts_done - view.rollouts_running
        v.set("longtail_rollouts", max(0, queued), "queued")

    @_locked
    def finish(self, summary: Mapping[str, Any]) -> None:
        self._tick()

    # ------------------------------------------------------------------ as the parts' telemetry

    @_locked
    def slot_changed(self, before: SlotLease, after: SlotLease, now: float) -> None:
        self._times.change(after.slot, after.state, now)
        self._show_state(after.slot)

    @_locked
    def reported(self, slot: int, report: ServerReport) -> None:
        v, name = self._values, slot_name(slot)
        v.inc("longtail_generated_tokens_total", max(0, report.new_tokens), name)
        v.inc("longtail_prefill_tokens_total", max(0, report.prefill_tokens), name)
        v.inc("longtail_server_busy_seconds_total", report.busy_s, name)
        for weights in ("policy", "drafter"):
            served = getattr(report.versions, weights)
            if served is not None:
                v.set("longtail_served_version", served, name, weights)
        for switch in report.memory_switches:
            self._switched("rollout", switch)
        for span in report.spans:
            v.inc("longtail_strategy_rounds_total", span.rounds, name, self._labels.known("strategy", span.strategy))
        self._accepted(report)

    @_locked
    def switched(self, switch: MemorySwitch) -> None:
        self._switched("policy", switch)

    def _switched(self, holder: str, switch: MemorySwitch) -> None:
        v, word = self._values, "release" if switch.released else "resume"
        v.inc("longtail_memory_switches_total", 1, holder, word)
        v.inc("longtail_memory_switch_seconds_total", switch.seconds, holder, word)
        v.inc("longtail_memory_switch_bytes_total", switch.num_bytes, holder, word)

    @_locked
    def decided(self, seconds: float) -> None:
        self._values.observe("longtail_decision_seconds", max(0.0, seconds))

    @_locked
    def trained(self, slot: int, progress: DrafterProgress) -> None:
        v, name = self._values, slot_name(slot)
        v.inc("longtail_drafter_micro_steps_total", progress.micro_steps, name)
        v.inc("longtail_drafter_trained_tokens_total", progress.num_tokens, name)
        v.inc("longtail_drafter_busy_seconds_total", progress.busy_s, name)
        buffer = progress.buffer
        if buffer is None:
            return
        v.set("longtail_drafter_buffer_sequences", buffer.num_sequences, name)
        v.set("longtail_drafter_buffer_bytes", buffer.num_bytes, name, "memory")
        v.set("longtail_drafter_buffer_bytes", buffer.spilled_bytes, name, "disk")
        before = self._drafting_slots.get(slot, {})
        for cause in CAUSES:
            lost, known = buffer.lost.get(cause, 0), before.get(cause, 0)
            # fewer than before: the trainer's process is another one and counts from nothing
            v.inc("longtail_drafter_sequences_lost_total", lost - known if lost >= known else lost, cause)
        self._drafting_slots[slot] = dict(buffer.lost)

    @_locked
    def left(self, seconds: float) -> None:
        self._values.observe("longtail_slot_return_seconds", seconds)

    @_locked
    def states_added(self, chunk: HiddenStateChunk) -> None:
        self._values.inc("longtail_hidden_state_sequences_total", chunk.num_sequences)
        self._values.inc("longtail_hidden_state_bytes_total", chunk.num_bytes)
        self._values.inc("longtail_hidden_state_missing_total", chunk.num_missing)

    @_locked
    def published(self, weights: Weights, version: int, seconds: float, blob: Blob) -> None:
        v, num_bytes = self._values, self._size_of(weights, blob)
        v.set("longtail_published_version", version, weights)
        v.observe("longtail_publish_seconds", seconds, weights)
        v.inc("longtail_publish_bytes_total", num_bytes or 0, weights)

    @_locked
    def loaded(self, seconds: float) -> None:
        self._values.observe("longtail_load_seconds", seconds)

    # ------------------------------------------------------------------ small helpers

    def _accepted(self, report: ServerReport) -> None:
        running = len(report.finished) + len(report.running)
        if not running:
            return
        (bucket,) = self._buckets[max(i for i, start in enumerate(self._starts) if start <= running)]
        for before, now in self._growth.of(report):
            steps, accepted, proposed = growth(before, now)
            for strategy, count in steps.items():
                self._values.inc("longtail_verify_steps_total", count, self._labels.known("strategy", strategy), bucket)
            for strategy, count in accepted.items():
                self._values.inc(
                    "longtail_accepted_tokens_total", count, self._labels.known("strategy", strategy), bucket
                )
            self._values.inc("longtail_draft_tokens_total", proposed, bucket)

    def _tick(self) -> None:
        now = self._clock()
        self._times.tick(now)
        self._work.tick(now)

    def _spent(self, slot: int, state: SlotState, seconds: float) -> None:
        self._values.inc("longtail_slot_seconds_total", seconds, slot_name(slot), state.value)
        if self._phase == "rollout" and state in FREE:
            use = "drafting" if state is SlotState.DRAFTING else "unused"
            self._values.inc("longtail_idle_seconds_total", seconds, use)

    def _worked(self, holder: str, seconds: float) -> None:
        self._values.inc("longtail_slot_seconds_total", seconds, holder, holder)

    def _window(self, seconds: float) -> None:
        if self._phase == "rollout":  # not in evaluations, where nobody may train
            self._values.observe("longtail_idle_window_seconds", seconds)

    def _show_state(self, slot: int) -> None:
        self._values.set("longtail_slot_state", STATES.index(self._times.states[slot]), slot_name(slot))
        for state in SlotState:
            self._values.set("longtail_slots", self._times.counts[state], state.value)

    def _show_phase(self, phase: str) -> None:
        self._phase = phase
        shown = self._labels.known("phase", phase)
        for one in PHASES:
            self._values.set("longtail_phase", one == shown, one)


def _step_gauges(metrics: StepMetrics) -> dict[str, float | None]:
    return {
        "truncated_fraction": metrics.truncated_fraction,
        "step_acceptance_length": metrics.acceptance_length,
        "reward_mean": metrics.reward_mean,
        "correct_fraction": metrics.correct_fraction,
        "zero_variance_fraction": metrics.zero_variance_fraction,
        "sampling_rounds": metrics.sampling_rounds,
        "policy_loss": metrics.policy_loss,
        "kl": metrics.kl,
        "entropy": metrics.entropy,
        "surprise": metrics.surprise,
        "surprise_errors": metrics.surprise_errors,
        "grad_norm": metrics.grad_norm,
        "logprob_gap": metrics.logprob_gap,
        "mismatch_kl": metrics.mismatch_kl,
        "corrected_fraction": metrics.corrected_fraction,
        "drafter_loss": metrics.drafter_loss,
        "predicted_gain": metrics.predicted_gain,
        "achieved_gain": metrics.achieved_gain,
    }
