"""The driver's view of a run on Ray: what the coordinator tells goes to the observer, a coordinator or a policy trainer
that dies is replaced, Ctrl-C is a stop at the next safe point."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from deploy.console import CONSOLE
from deploy.resuming import GoBack
from services.coordinator.observer import RunObserver
from services.coordinator.resume import RunMemory, Takeover
from services.core.checkpoints import CheckpointPlan, step_of
from services.core.errors import LongtailError, ServiceLostError, WaitTimeoutError
from services.core.types import RunEvent

POLL_S = 0.25
# After Ctrl-C: the longest the run may take to reach a safe point. A policy step on a CPU can take a while.
STOP_TIMEOUT_S = 60.0


class Watch:
    """The driver's view of a run: feeds the observer, replaces a coordinator that dies, handles Ctrl-C, finishes
    exactly once."""

    def __init__(
        self,
        observer: RunObserver,
        on_drafter: Callable[[int, Mapping[str, Any]], None],
        restarts: int,
        before: Takeover | None,
        go_back: GoBack | None,
    ) -> None:
        self._go_back = go_back
        self._observer = RunMemory.of(observer, before)
        self._on_drafter = on_drafter
        self._last_incarnation = self._observer.incarnation + restarts
        self._started_s = time.monotonic() - (before.elapsed_s if before else 0.0)
        self._summary: Mapping[str, Any] | None = None
        self._finished = self._stopping = False

    def follow(self, coordinator: Any, replaced: Callable[[Takeover, CheckpointPlan | None], Any]) -> dict[str, Any]:
        while True:
            try:
                return self._follow(coordinator)
            except ServiceLostError as error:
                if not self._can_replace(error):
                    raise
                elapsed_s = time.monotonic() - self._started_s
                if error.name == "policy":  # the coordinator has told its loss
                    checkpoints = self._rewound(elapsed_s)
                else:
                    checkpoints = None
                    self._observer.event(RunEvent(elapsed_s, "coordinator_lost", "coordinator", error.reason))
                self._summary = None  # of the part of the run that ended here
                coordinator = replaced(self._observer.takeover(elapsed_s), checkpoints)

    def _can_replace(self, lost: ServiceLostError) -> bool:
        wanted = lost.name == "coordinator" or (lost.name == "policy" and self._go_back is not None)
        return wanted and not self._stopping and self._observer.incarnation < self._last_incarnation

    def _rewound(self, elapsed_s: float) -> CheckpointPlan:
        assert self._go_back is not None
        checkpoints = self._go_back()
        step = 0 if checkpoints.start is None else step_of(checkpoints.start)
        self._observer.rewind(step)
        message = f"another policy trainer goes on after step {step}, from its checkpoint; later steps are done again"
        self._observer.event(RunEvent(elapsed_s, "policy_replaced", "policy", message))
        return replace(checkpoints, least_version=self._observer.policy_version + 1)

    def _follow(self, coordinator: Any) -> dict[str, Any]:
        run = coordinator.run.remote()
        try:
            self._until_done(coordinator, run, None)
        except KeyboardInterrupt:
            self._stopping = True
            coordinator.stop.remote()
            self._until_done(coordinator, run, time.monotonic() + STOP_TIMEOUT_S)
        summary = self._result(coordinator, run)
        self._save_drafter(coordinator)
        self.finish_for("finished", None)
        return summary

    def finish_for(self, status: str, error: str | None) -> None:
        """Finish the observer with the coordinator's summary, or with what little is known when it has none."""
        if not self._finished:
            self._finished = True
            self._observer.finish(self._summary or {"status": status, "error": error})

    def _until_done(self, coordinator: Any, run: Any, give_up_s: float | None) -> None:
        done: list[Any] = []
        while not done:
            done, _ = ray.wait([run], timeout=POLL_S)
            self._observe(coordinator)
            if give_up_s is not None and time.monotonic() > give_up_s:
                raise WaitTimeoutError(f"the run did not reach a safe point within {STOP_TIMEOUT_S:.0f} s of Ctrl-C")
        self._observe(coordinator)

    def _observe(self, coordinator: Any) -> None:
        try:
            news = ray.get(coordinator.observations.remote(), timeout=30.0)
        except RayActorError:
            return  # `run` fails with the same cause, and says it
        except GetTimeoutError:
            raise WaitTimeoutError("the coordinator did not answer within 30 s: see the Ray logs") from None
        for method, arguments in news:
            if method == "finish":
                self._summary = arguments[0]
            else:
                getattr(self._observer, method)(*arguments)

    def _result(self, coordinator: Any, run: Any) -> dict[str, Any]:
        try:
            summary: dict[str, Any] = ray.get(run, timeout=30.0)
        except RayTaskError as error:
            if isinstance(error.cause, LongtailError):
                self._save_drafter(coordinator)
                raise error.cause from None
            raise
        except RayActorError as error:
            raise ServiceLostError("coordinator", cause(error)) from None
        return summary

    def _save_drafter(self, coordinator: Any) -> None:
        published = ray.get(coordinator.published_drafter.remote(), timeout=30.0)
        if published is not None:
            version, (reference,) = published
            with warnings.catch_warnings():  # tensors are views of the object store, and are only read
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                try:
                    tensors = ray.get(reference, timeout=30.0)
                except ObjectLostError:
                    CONSOLE.print(f"drafter version {version} is lost with its machine, it is not in the run folder")
                    return
            self._on_drafter(version, tensors)


def cause(error: Exception) -> str:
    """The last line of what the constructor raised: Ray puts its whole traceback into the message."""
    return str(error).strip().splitlines()[-1].strip()
