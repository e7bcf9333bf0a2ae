"""A run on Ray actors: start, place, watch, and leave nothing behind.

The driver owns the run folder. It fetches what the coordinator has to tell, hands it to the observer, and turns
Ctrl-C into a stop at the coordinator's next safe point.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.clients import CONTROL, RayCall
from actors.coordinator import CoordinatorActor
from actors.drafter import DrafterActor
from actors.policy import PolicyActor
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from deploy.console import CONSOLE, START_NEWS_S
from deploy.inputs import load_inputs
from deploy.metering import plan_meters, seats, start_meters
from deploy.naming import actor_name, nameless_run_id
from deploy.placement import (
    ROLES,
    TRAINER_ENV,
    ActorPlan,
    actor_env,
    plan_actors,
    role_selector,
)
from deploy.session import ray_session
from deploy.slots import first_gpu, place_slots
from services.config.schema import ClusterConfig
from services.coordinator.observer import RunObserver
from services.coordinator.resume import RunMemory, Takeover
from services.coordinator.services import Inputs
from services.core.energy import GpuName
from services.core.errors import LongtailError, ServiceLostError, StopRequested, WaitTimeoutError
from services.core.types import RunEvent

KINDS = {"rollout": RolloutActor, "drafter": DrafterActor, "policy": PolicyActor, "reward": RewardActor}

POLL_S = 0.25
# After Ctrl-C: the longest the run may take to reach a safe point. A policy step on a CPU can take a while.
STOP_TIMEOUT_S = 60.0

Handles = dict[str, Any]


def run_on_ray(
    config: ClusterConfig,
    observer: RunObserver,
    on_drafter: Callable[[int, Mapping[str, Any]], None] = lambda version, tensors: None,
    on_start: Callable[[Handles], None] = lambda handles: None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """One run to its summary. The observer is finished in every case, also when the run fails or is stopped.

    `on_drafter` gets (version, trainable tensors) of the drafter published last, before the observer is finished.
    `on_start` gets the actor handles by name. `run_id` is part of the actors' names. Raises StopRequested after Ctrl-C.
    """
    inputs, run_id = load_inputs(config), run_id or nameless_run_id()
    watch = _Watch(observer, on_drafter, config.coordinator.max_restarts)
    try:
        with ray_session(config), actors(config, inputs, run_id) as handles:
            meters = start_energy(handles, config.coordinator.start_timeout_s)
            meters.tell(handles["coordinator"])
            on_start(handles)
            return watch.follow(handles["coordinator"], partial(_replaced, config, inputs, run_id, handles, meters))
    except KeyboardInterrupt:
        watch.finish_for("stopped", None)
        raise StopRequested("stopped before the run began or before it reached a safe point") from None
    except LongtailError as error:
        watch.finish_for("stopped" if isinstance(error, StopRequested) else "failed", str(error))
        raise


@contextmanager
def actors(config: ClusterConfig, inputs: Inputs, run_id: str | None = None) -> Iterator[Handles]:
    """Every actor of the run, constructed and answering."""
    run_id = run_id or nameless_run_id()
    group = place_slots(config)
    handles: Handles = {}
    try:
        plans = plan_actors(config)
        lenders = {p.slot for p in plans if p.borrows_gpu}
        lent = {slot: first_gpu(group, slot, config) for slot in sorted(s for s in lenders if s is not None)}
        for plan in plans:
            handles[plan.name] = _start(plan, config, run_id, group, lent)
        # Last, so that of several that cannot start the coordinator, which waits for the others, is named last.
        handles["coordinator"] = _start_coordinator(config, inputs, run_id, handles, None)
        _await_all(handles, config.coordinator.start_timeout_s)
        yield handles
    finally:
        _stop_actors(handles)
        if group is not None:
            remove_placement_group(group)


def _start(plan: ActorPlan, config: ClusterConfig, run_id: str, group: Any, lent: Mapping[int, str]) -> Any:
    env = actor_env(plan.threads) | (TRAINER_ENV if plan.kind in ("policy", "drafter") else {})
    if plan.borrows_gpu and plan.slot is not None:
        env["CUDA_VISIBLE_DEVICES"] = lent[plan.slot]
    options: dict[str, Any] = {
        "name": actor_name(run_id, plan.name),
        "num_cpus": plan.cpus,
        "num_gpus": plan.gpus,
        "max_restarts": plan.restarts,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": env},
    }
    if plan.slot is not None and group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=plan.slot
        )
    elif selector := role_selector(config, ROLES[plan.kind]):
        options["label_selector"] = selector
    arguments = (config,) if plan.slot is None else (config, plan.slot)
    return remote_class(plan.kind).options(**options).remote(*arguments)


def _start_coordinator(
    config: ClusterConfig, inputs: Inputs, run_id: str, handles: Handles, takeover: Takeover | None
) -> Any:
    """Ray does not restart it: another one must know that it takes over. It lives on the driver's node, so that no cut
    cable comes between the two."""
    incarnation = f"-{takeover.incarnation}" if takeover else ""  # Ray frees the name of a dead one in its own time
    made = ray.remote(CoordinatorActor).options(
        name=actor_name(run_id, f"coordinator{incarnation}"),
        num_cpus=0,
        max_restarts=0,
        max_concurrency=4,
        runtime_env={"env_vars": actor_env(1)},
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    )
    others = {name: handle for name, handle in handles.items() if name != "coordinator"}
    return made.remote(config, inputs, others, takeover)


def _replaced(
    config: ClusterConfig, inputs: Inputs, run_id: str, handles: Handles, meters: EnergyMeters, takeover: Takeover
) -> Any:
    handles["coordinator"] = coordinator = _start_coordinator(config, inputs, run_id, handles, takeover)
    _await_all({"coordinator": coordinator}, config.coordinator.start_timeout_s)
    meters.tell(coordinator)
    return coordinator


def remote_class(kind: str) -> Any:
    """Calls in the group CONTROL run in a thread of their own: an `interrupt` overtakes the `train` it is meant for."""
    made = ray.remote(concurrency_groups={CONTROL: 1}) if kind == "drafter" else ray.remote
    return made(KINDS[kind])


def _await_all(handles: Handles, timeout_s: float) -> None:
    """Wait until every actor answers; a time-out names those that do not, a failed constructor says why."""
    refs = {handle.process_id.remote(): name for name, handle in handles.items()}
    late, started = list(refs), time.monotonic()
    while late and time.monotonic() - started < timeout_s:
        ready, late = ray.wait(late, num_returns=len(late), timeout=min(START_NEWS_S, timeout_s))
        for ref in ready:
            try:
                ray.get(ref)
            except RayActorError as error:
                raise ServiceLostError(refs[ref], f"it could not start: {_cause(error)}") from None
        if late:
            names = ", ".join(refs[ref] for ref in late)
            CONSOLE.print(f"waiting for {names}: {time.monotonic() - started:.0f} s of at most {timeout_s:.0f} s")
    if late:
        raise WaitTimeoutError(
            f"{names} did not start within {timeout_s:.0f} s: see the Ray logs, or raise coordinator.start_timeout_s"
        )


@dataclass(frozen=True)
class EnergyMeters:
    """The energy meters by name, and who uses which GPU."""

    handles: Handles
    users: dict[str, tuple[GpuName, ...]]
    timeout_s: float

    def tell(self, coordinator: Any) -> None:
        told = coordinator.measure_energy.remote(self.handles, self.users)
        RayCall(told, "coordinator", "measure_energy").result(self.timeout_s)


def start_energy(handles: Handles, timeout_s: float) -> EnergyMeters:
    """They end with the other actors in `handles`."""
    meters, users = plan_meters(seats(handles, timeout_s))
    started = start_meters(meters)
    handles.update(started)
    return EnergyMeters(started, users, timeout_s)


def _cause(error: Exception) -> str:
    """The last line of what the constructor raised: Ray puts its whole traceback into the message."""
    return str(error).strip().splitlines()[-1].strip()


def _stop_actors(handles: Handles) -> None:
    """End the reward workers in an orderly way, then every actor."""
    if "reward" in handles:
        ray.wait([handles["reward"].close.remote()], timeout=5.0)
    for handle in handles.values():
        ray.kill(handle)


class _Watch:
    """The driver's view of a run: feeds the observer, replaces a coordinator that dies, handles Ctrl-C, finishes
    exactly once."""

    def __init__(
        self, observer: RunObserver, on_drafter: Callable[[int, Mapping[str, Any]], None], restarts: int
    ) -> None:
        self._observer = RunMemory(observer)
        self._on_drafter = on_drafter
        self._restarts = restarts
        self._summary: Mapping[str, Any] | None = None
        self._finished = False

    def follow(self, coordinator: Any, replace: Callable[[Takeover], Any]) -> dict[str, Any]:
        started = time.monotonic()
        while True:
            try:
                return self._follow(coordinator)
            except ServiceLostError as error:
                if error.name != "coordinator" or self._observer.incarnation >= self._restarts:
                    raise
                elapsed_s = time.monotonic() - started
                self._observer.event(RunEvent(elapsed_s, "coordinator_lost", "coordinator", error.reason))
                coordinator = replace(self._observer.takeover(elapsed_s))

    def _follow(self, coordinator: Any) -> dict[str, Any]:
        run = coordinator.run.remote()
        try:
            self._until_done(coordinator, run, None)
        except KeyboardInterrupt:
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
            raise ServiceLostError("coordinator", _cause(error)) from None
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
                    CONSOLE.print(
                        f"drafter version {version} is lost with its machine and is not written to the run folder"
                    )
                    return
            self._on_drafter(version, tensors)
