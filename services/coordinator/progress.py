"""What is happening right now, for the live display. One thread writes; any thread may read the latest view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.core.protocols import Clock
from services.core.types import AcceptanceStats, ControlState, ProgressView, RunEvent, ServerReport

REFRESH_S = 0.25
EVENTS_SHOWN = 5


class ProgressBoard:
    """`slots` answers with the present state of every slot, `now` with the run's seconds, `control` with what people
    asked of it. `publish` receives a view at most every REFRESH_S."""

    def __init__(
        self,
        num_steps: int,
        clock: Clock,
        slots: Callable[[], Mapping[str, str]],
        publish: Callable[[ProgressView], None],
        now: Callable[[], float],
        control: Callable[[], ControlState],
    ) -> None:
        self._clock, self._now, self._control = clock, now, control
        self._slots = slots
        self._publish = publish
        self._num_steps = num_steps
        self._events: list[RunEvent] = []
        self._tokens = 0
        self._started_s = clock()
        self._next_s = 0.0
        self._acceptance = _Acceptance()
        self.phase = "starting"
        self._phase_at_s = now()
        self.step = 0
        self.rollouts_total = 0
        self.rollouts_done = 0
        self.reward_mean: float | None = None
        self.heldout_reward: float | None = None
        self.policy_version = 0
        self.drafter_version = 0
        self.latest = self._view()

    def begin(self, phase: str, rollouts_total: int) -> None:
        self.phase, self.rollouts_total, self.rollouts_done = phase, rollouts_total, 0
        self._phase_at_s = self._now()
        self._tokens, self._started_s = 0, self._clock()
        self._acceptance = _Acceptance()
        self.refresh(force=True)

    def enter(self, phase: str) -> None:
        self.phase, self._phase_at_s = phase, self._now()
        self.refresh(force=True)

    def report(self, server: str, report: ServerReport) -> None:
        """Take one server report: tokens, and the acceptance of each request that runs or has finished."""
        self._tokens += report.new_tokens
        self._acceptance.report(server, report)
        self.refresh()

    def forget(self, server: str) -> None:
        self._acceptance.forget(server)

    def event(self, event: RunEvent) -> None:
        self._events = [*self._events, event][-EVENTS_SHOWN:]
        self.refresh(force=True)

    def refresh(self, force: bool = False) -> None:
        now = self._clock()
        if force or now >= self._next_s:
            self._next_s = now + REFRESH_S
            self.latest = self._view()
            self._publish(self.latest)

    def _view(self) -> ProgressView:
        elapsed = self._clock() - self._started_s
        return ProgressView(
            phase=self.phase,
            step=self.step,
            num_steps=self._num_steps,
            rollouts_done=self.rollouts_done,
            rollouts_total=self.rollouts_total,
            rollouts_running=self._acceptance.num_running,
            tokens_per_s=self._tokens / elapsed if elapsed > 0 else 0.0,
            acceptance_length=self._acceptance.length,
            reward_mean=self.reward_mean,
            heldout_reward=self.heldout_reward,
            policy_version=self.policy_version,
            drafter_version=self.drafter_version,
            slots=dict(self._slots()),
            events=tuple(self._events),
            at_s=self._now(),
            phase_at_s=self._phase_at_s,
            control=self._control(),
        )


@dataclass(slots=True)
class _Sums:
    """Of requests: how many, their verify steps, and the tokens committed in these."""

    requests: int = 0
    verify_steps: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, parts: Iterable[AcceptanceStats]) -> _Sums:
        sums = cls()
        for part in parts:
            sums.requests += 1
            sums.verify_steps += part.verify_steps
            sums.tokens += part.verify_steps + part.num_accepted_tokens
        return sums

    def add(self, other: _Sums, times: int = 1) -> None:
        self.requests += times * other.requests
        self.verify_steps += times * other.verify_steps
        self.tokens += times * other.tokens


class _Acceptance:
    """Of all requests of a phase, kept as sums: a report changes its own server's part only."""

    def __init__(self) -> None:
        self._all, self._running = _Sums(), dict[str, _Sums]()
        self.num_running = 0

    @property
    def length(self) -> float | None:
        return self._all.tokens / self._all.verify_steps if self._all.verify_steps else None

    def report(self, server: str, report: ServerReport) -> None:
        self.forget(server)
        running = self._running[server] = _Sums.of(r.acceptance for r in report.running)
        self._all.add(running)
        self._all.add(_Sums.of(r.acceptance for r in report.finished))
        self.num_running += running.requests

    def forget(self, server: str) -> None:
        running = self._running.pop(server, None)
        if running is not None:
            self._all.add(running, -1)
            self.num_running -= running.requests
