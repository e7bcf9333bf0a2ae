"""The coordinator: the verbs of the loop over real services, and the run around it.

`Coordinator` wires the small parts of this package together; each verb is a few lines that say who is asked. It runs
in one thread. `control`, `stop`, `latest` and `diagnosis` may be called from another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from services.config.schema import ClusterConfig
from services.coordinator import loop
from services.coordinator.alarms import useless_drafter
from services.coordinator.assembly import Parts, make_drafting, make_forecast, make_phase
from services.coordinator.beside import BesidePolicy
from services.coordinator.calls import Calls
from services.coordinator.checkpoints import Checkpoints, Learned
from services.coordinator.comparison import ForcedRuns
from services.coordinator.control import Control, SafePoint, forceable
from services.coordinator.diagnosis import Diagnosis, diagnose
from services.coordinator.dynamic_sampling import PromptDraws, StepGroups
from services.coordinator.fleet import Fleet, Patience, Published
from services.coordinator.leases import LeaseBook
from services.coordinator.ledger import FinishedGroup
from services.coordinator.metering import Metering, method_word
from services.coordinator.metrics import StepFacts, step_metrics
from services.coordinator.observer import RunObserver
from services.coordinator.progress import ProgressBoard
from services.coordinator.recovery import Recovery, policy_loss_told
from services.coordinator.releases import Releases
from services.coordinator.resume import Takeover
from services.coordinator.salvage import salvage
from services.coordinator.scoring import Scoring
from services.coordinator.selectors import SelectorStates
from services.coordinator.services import Inputs, Services
from services.coordinator.stats import group_stats
from services.coordinator.strategies import StrategyLog
from services.coordinator.summary import Summary
from services.coordinator.telemetry.facts import NO_TELEMETRY, Telemetry
from services.coordinator.timeline import Timeline
from services.coordinator.trainers import Trainers
from services.coordinator.turns import Turns
from services.coordinator.work import make_work
from services.coordinator.worth import Worth
from services.core.energy import EnergyClient, GpuName
from services.core.errors import LongtailError, StopRequested
from services.core.protocols import Clock, Pending
from services.core.types import (
    EvalResult,
    Group,
    ProgressView,
    Prompt,
    RunEvent,
    SlotLease,
    SlotSpan,
    SlotState,
    TrainBatch,
)

T = TypeVar("T")


class Coordinator:
    def __init__(
        self,
        config: ClusterConfig,
        inputs: Inputs,
        services: Services,
        observer: RunObserver,
        clock: Clock,
        takeover: Takeover | None = None,
        telemetry: Telemetry = NO_TELEMETRY,
    ) -> None:
        num_slots = len(services.rollout)
        assert num_slots and len(services.drafters) in (0, num_slots)
        self._config, self._inputs, self._services = config, inputs, services
        self._observer, self._clock, self._telemetry = observer, clock, telemetry
        self._takeover, self._steps_done = takeover, 0
        before = takeover or Takeover(0, 0.0)
        self.control = Control(forceable(config), before.control, config.run.checkpoint_every > 0)
        self._timeline = Timeline(num_slots, clock, self._span, before.elapsed_s)
        self._strategies = StrategyLog(self._timeline, observer.strategy)
        lease_s = config.coordinator.lease_s
        self._leases = LeaseBook(num_slots, lease_s, clock(), self._slot_changed, before.first_epoch)
        self._calls = Calls(services.waiter, clock, self._check_stop)
        self._metering = Metering((), {}, self._calls, self._timeline.now, self._tell)
        self._board = ProgressBoard(
            config.run.steps, clock, self._slots, observer.progress, self._timeline.now, lambda: self.control.state
        )
        self._patience = Patience(config.coordinator.call_timeout_s, config.coordinator.start_timeout_s)
        self._summary = Summary(list(before.steps), list(before.evaluations), events=before.events)
        self._facts = StepFacts()
        self._draws = PromptDraws.configured(config, inputs.train)
        self._groups = StepGroups(self._draws, 1, self._has_signal)
        lends = config.placement.lends_memory
        self._fleet = Fleet(services.rollout, self._leases, self._calls, clock, self._patience, self._tell, lends)
        self._fleet.on_blobs_lost = self._salvage
        self._engine_states = config.drafter.states == "engine"
        states, added = config.drafter.buffer_bytes, telemetry.states_added
        self._trainers = Trainers(services.drafters, self._calls, clock, self._patience, self._tell, states, added)
        parts = Parts(config, self._fleet, self._trainers, self._leases, self._calls, clock, self._tell, telemetry)
        self._parts = parts
        self._drafting = make_drafting(parts, services.initial_drafter)
        self._releases = Releases(
            self._trainers, services.initial_drafter, clock, self._patience, self._tell, self._calls.turn
        )
        self._turns = Turns(parts, self._drafting, services.policy, self._ask_policy)
        self._beside, self._worth = BesidePolicy(parts, self._drafting, self._window), Worth(config.drafter.training)
        self._phase = make_phase(parts, self._drafting, self._board, self._strategies, services.cores)
        self._forecast, self._selectors = make_forecast(parts, inputs.sampling), SelectorStates(parts)
        self._scoring = Scoring(config.reward, services.reward, self._calls, clock, self._patience, self._tell)
        self.checkpoints = Checkpoints(
            services.policy,
            inputs.train,
            parts,
            self._drafting,
            self._releases,
            self._patience,
            Learned(self._selectors, self._worth),
        )
        self._safe_point = SafePoint(
            self.control, self._fleet, self._calls, self._timeline, self._board, self._tell, self.checkpoints.now
        )

    def measure_energy(self, meters: Sequence[EnergyClient], users: Mapping[str, Sequence[GpuName]]) -> None:
        """Before `run`. `users`: the GPUs of "slot <i>" and "policy"."""
        self._metering = Metering(meters, users, self._calls, self._timeline.now, self._tell)

    # ------------------------------------------------------------------ the run around the loop

    def run(self) -> dict[str, Any]:
        """Train, compare, and tell the observer how it ended. Returns the summary.

        Raises StopRequested after `stop`, and whatever ended the run early; the observer is finished in every case.
        """
        status, error = "failed", "unexpected: see the log"
        try:
            with policy_loss_told(self._services.policy.name, self._tell):
                self._take_over()
                loop.train(self, self._config.run.steps, self._config.run.eval_every)
                self._compare()
                self.checkpoints.flush()
            self._board.enter("finished")
            status, error = "finished", ""
        except (StopRequested, KeyboardInterrupt):  # the latter with every service in this process
            status, error = "stopped", ""
            with policy_loss_told(self._services.policy.name, self._tell):
                self.checkpoints.before_stopping()
            raise
        except LongtailError as problem:
            error = str(problem)
            raise
        finally:
            self.control.end()
            self._timeline.close()
            self._strategies.close()
            summary = self._summary.as_dict(status, self._timeline.now(), error or None)
            self._observer.finish(summary)
        return summary

    def stop(self) -> None:
        """Make the run raise StopRequested at its next safe point."""
        self.control.stop()

    def latest(self) -> ProgressView:
        return self._board.latest

    def diagnosis(self) -> Diagnosis:
        return diagnose(self._board, self._leases, self._fleet, self._calls, self._clock)

    @property
    def published_drafter(self) -> Published | None:
        return self._fleet.drafter

    def _take_over(self) -> None:
        if self._takeover is not None:
            policy, parts = self._services.policy, self._parts
            found = Recovery(parts, policy, self._drafting, self._releases, self.checkpoints, self._ask_policy)
            self._steps_done = found.take_over(self._takeover)

    # ------------------------------------------------------------------ the verbs: rollout and reward

    @property
    def steps_done(self) -> int:
        return self._steps_done

    def safe_point(self) -> None:
        self._safe_point.reach()

    def prompts(self, step: int) -> Sequence[Prompt]:
        self._facts = StepFacts(predicted_gain=self._forecast.gain)
        self._drafting.progress = []
        self._timeline.enter(f"step {step}")
        self._metering.begin()
        self._board.step = step
        place = step - self.checkpoints.data.since
        self._groups = StepGroups(self._draws, place, self._has_signal)
        return self._draws.of_step(place)

    def generate(self, step: int, prompts: Sequence[Prompt]) -> Iterator[FinishedGroup]:
        rollout = self._config.rollout
        label, sampling, seed = f"step{step:05d}", self._inputs.sampling, self._config.run.seed
        keep = self._engine_states and self._worth.wants_states(step)
        works = make_work(prompts, label, rollout.group_size, sampling, seed, keep, len(self._groups.sampled))
        self._board.begin("rollout", len(prompts) * rollout.group_size)
        with self._window(), self._timed("rollout"):
            drafters = self._worth.slots(len(self._leases), step)
            yield from self._phase.generate(works, drafters, step if keep else None)

    def score(self, group: FinishedGroup) -> None:
        self._scoring.submit(group)

    def further(self) -> Sequence[Prompt]:
        self._board.enter("reward")
        with self._timed("reward"), self._timeline.span("reward", "reward"):
            groups = self._scoring.collect()
        return self._groups.add(groups)

    def chosen(self) -> list[Group]:
        sampled, chosen = self._groups.sampled, self._groups.chosen()
        self._facts.sampled(self._groups)
        self._facts.zero_variance_fraction = self._services.advantages(sampled)[1]
        asked = [i for i in range(len(self._leases)) if self._leases.state(i) is not SlotState.LOST]
        self._forecast.ask(sampled, asked)
        self._selectors.ask(asked)
        self._board.reward_mean = group_stats(sampled).reward_mean
        return chosen

    def advantages(self, groups: Sequence[Group]) -> tuple[float, ...]:
        return self._services.advantages(groups)[0]

    def _has_signal(self, group: Group) -> bool:
        return any(self._services.advantages([group])[0])

    # ------------------------------------------------------------------ the verbs: policy, drafter, weights

    def train_step(self, batch: TrainBatch) -> None:
        self.checkpoints.recorded = None
        self._board.enter("policy")
        wanted, by_servers = self._worth.wants_states(batch.step), self._engine_states
        step = batch.step if wanted and by_servers else None
        with self._timed("policy"), self._timeline.span("policy", "policy"):
            self._turns.begin(step)
            report, pending, blob = self._services.policy.train_step(replace(batch, keep_states=wanted))
            self._drafting.finish()
            if by_servers:  # nobody needs the policy for it: the verdict comes while it trains
                self._turns.take_states(step)
                self._judge(wanted)
            with self._beside.training(self._worth.slots(len(self._leases), batch.step)):
                self._facts.policy = self._ask_policy(report)
                chunk = self._ask_policy(pending)
        if not by_servers:
            if wanted:
                self._trainers.add_chunk(chunk, blob)
            self._judge(wanted)

    def _judge(self, wanted: bool) -> None:
        """The drafter's states, if `wanted`, are on their way to the trainers, and nobody has trained on them."""
        self._releases.estimate(self._drafting.live if wanted else None)

    def publish_policy(self) -> None:
        self._board.enter("publish")
        start = self._clock()
        with self._timed("publish"):
            policy = self._services.policy
            pending, blob, head = policy.publish()
            version = self._ask_policy(pending)
        self._telemetry.published("policy", version, self._clock() - start, blob)
        self._fleet.policy = Published(version, blob, partial(policy.copy_of, version))
        self._trainers.adopt_head(Published(version, head))
        self._summary.policy_version = self._board.policy_version = version

    def publish_drafter(self) -> None:
        if self._calls.blobs_lost:
            self._salvage()
        start = self._clock()
        with self._timed("publish"):
            first, releases = self._fleet.drafter is None, self._releases
            published = releases.publish_first() if first else releases.publish()
        if published is not None:
            self._telemetry.published("drafter", published.version, self._clock() - start, published.blob)
            self._fleet.drafter = published
            self._summary.drafter_version = self._board.drafter_version = published.version
            if not first:
                self._tell("drafter_published", "drafter", f"drafter version {published.version}")

    def load(self) -> None:
        self._board.enter("load")
        start = self._clock()
        with self._timed("publish"):
            self._turns.end()
            self._drafting.leave()
            self._fleet.open_all()
        self._drafting.prepare()
        self._telemetry.loaded(self._clock() - start)

    def _salvage(self) -> None:
        """Tensors were lost with a machine. What the policy published may be among them: it publishes again."""
        salvage(self._fleet, self._trainers, self._drafting, self._releases, self._calls, self._tell)
        if self._fleet.drafter is not None:
            self._summary.drafter_version = self._board.drafter_version = self._fleet.drafter.version
        self.publish_policy()

    # ------------------------------------------------------------------ the verbs: evaluation and record

    def evaluate(self, step: int) -> None:
        prompts = self._inputs.heldout[: self._config.run.eval_prompts]
        if not prompts or any(e.step == step for e in self._summary.evaluations):
            return
        self._timeline.enter(f"evaluation {step}")
        self._board.begin("evaluation", len(prompts))
        self._fleet.open_all()
        for group in self._phase.generate(make_work(prompts, "heldout", 1, self._inputs.sampling, 0), drafters=0):
            self._scoring.submit(group)
        stats = group_stats(self._scoring.collect())
        result = EvalResult(
            step, self._timeline.now(), stats.num_groups, stats.num_rollouts, stats.reward_mean, stats.correct_fraction
        )
        self._board.heldout_reward = result.reward_mean
        self._summary.evaluations.append(result)
        self._observer.evaluation(result)

    def record(self, step: int) -> None:
        self._releases.settle()
        self._facts.drafter = tuple(self._drafting.progress)
        self._facts.drafter_version = self._summary.drafter_version
        self._facts.achieved_gain = self._strategies.achieved_gain
        self._facts.energy_j = self._metering.end(self._timeline.open_spans())
        self._summary.energy_method = method_word(self._metering.methods)
        metrics = step_metrics(step, self._timeline.now(), self._facts, self._releases.estimates)
        self._summary.steps.append(metrics)
        self._observer.step(metrics)
        self._observer.rollouts(step, self._facts.groups)
        self.checkpoints.recorded = step
        alarm = useless_drafter(self._summary.steps)
        if alarm is not None:
            self._tell("drafter_useless", "drafter", alarm)
        rollouts = [r for g in self._facts.groups for r in g.rollouts]
        news = self._worth.step(rollouts, self._releases.gain)
        if news is not None and self._config.drafter.training.when == "auto":
            self._tell("drafter_rests" if self._worth.resting else "drafter_trains", "drafter", news)

    def checkpoint(self, step: int) -> None:
        self.checkpoints.after(step)

    # ------------------------------------------------------------------ speculation off against on

    def _compare(self) -> None:
        if self._config.run.compare_prompts:
            parts = self._parts, self._phase, self._timeline, self._board
            self._summary.comparison = ForcedRuns(*parts).compare(self._inputs)

    # ------------------------------------------------------------------ small helpers

    def _ask_policy(self, pending: Pending[T]) -> T:
        answer = self._calls.wait_for(self._services.policy.name, pending, self._patience.call_s)
        self._turns.heard()
        return answer

    def _slot_changed(self, before: SlotLease, after: SlotLease, now: float) -> None:
        self._timeline.slot_changed(before, after, now)
        self._telemetry.slot_changed(before, after, now)

    def _span(self, span: SlotSpan) -> None:
        self._metering.span(span)
        self._observer.span(span)

    def _tell(self, kind: str, subject: str, message: str) -> RunEvent:
        event = RunEvent(self._timeline.now(), kind, subject, message)
        self._summary.events += 1
        self._observer.event(event)
        self._board.event(event)
        return event

    def _slots(self) -> Mapping[str, str]:
        return {f"slot {i}": self._leases.state(i).value for i in range(len(self._leases))}

    def _check_stop(self) -> None:
        if self.control.stopping:
            raise StopRequested("stopped on request: the run folder holds what was done until now")

    @contextmanager
    def _window(self) -> Iterator[None]:
        self._timeline.open_window()
        yield
        self._facts.add_slot_seconds(self._timeline.close_window())

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._facts.seconds
            seconds[phase] = seconds.get(phase, 0.0) + self._clock() - start
