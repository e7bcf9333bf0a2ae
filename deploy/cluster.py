"""A run on Ray actors: start, place, watch, and leave nothing behind.

The driver owns the run folder. It fetches what the coordinator has to tell, hands it to the observer, and turns
Ctrl-C into a stop at the coordinator's next safe point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.clients import CONTROL, TRANSFERS, WORKERS, RayCall
from actors.coordinator import CoordinatorActor
from actors.drafter import DrafterActor
from actors.policy import PolicyActor
from actors.policy_team import PolicyTeamActor, WorkerPlace, leader_threads, transfer_threads
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from deploy.colocation import require_shared, slot_nodes, worker_selectors
from deploy.console import CONSOLE, START_NEWS_S
from deploy.inputs import load_inputs
from deploy.leftovers import await_names_free
from deploy.metering import EnergyMeters, seats, start_energy
from deploy.naming import actor_name
from deploy.placement import ROLES, TRAINER_ENV, ActorPlan, actor_env, plan_actors, role_selector, team_env
from deploy.resuming import GoBack, Start, nameless_start
from deploy.session import ray_session
from deploy.slots import first_gpu, place_slots
from deploy.watch import Watch, cause
from services.config.schema import ClusterConfig
from services.coordinator.observer import RunObserver
from services.coordinator.resume import Takeover
from services.coordinator.services import Inputs
from services.core.checkpoints import CheckpointPlan
from services.core.errors import LongtailError, ServiceLostError, StopRequested, WaitTimeoutError
from services.weights.link import NCCL_PAIR_ENV

KINDS = {
    "rollout": RolloutActor,
    "drafter": DrafterActor,
    "policy": PolicyActor,
    "policy_team": PolicyTeamActor,
    "reward": RewardActor,
}

Handles = dict[str, Any]


def run_on_ray(
    config: ClusterConfig,
    observer: RunObserver,
    on_drafter: Callable[[int, Mapping[str, Any]], None] = lambda version, tensors: None,
    on_start: Callable[[Handles], None] = lambda handles: None,
    start: Start | None = None,
    go_back: GoBack | None = None,
) -> dict[str, Any]:
    """One run to its summary; without `start` a new one that writes no checkpoints. The observer is finished in every
    case, also when the run fails or is stopped. `go_back`: how a run whose policy trainer dies goes on from its last
    checkpoint; None: it ends.

    `on_drafter` gets (version, trainable tensors) of the drafter published last, before the observer is finished.
    `on_start` gets the actor handles by name. Raises StopRequested after Ctrl-C.
    """
    start = start or nameless_start()
    config = start.fitted(config)
    inputs = load_inputs(config)
    watch = Watch(observer, on_drafter, config.coordinator.max_restarts, start.takeover, go_back)
    try:
        with ray_session(config), _slots_and_actors(config, inputs, start) as (group, handles):
            meters = start_energy(handles, config.coordinator.start_timeout_s)
            meters.tell(handles["coordinator"])
            on_start(handles)
            another = partial(_replaced, config, inputs, start, group, handles, meters)
            return watch.follow(handles["coordinator"], another)
    except KeyboardInterrupt:
        watch.finish_for("stopped", None)
        raise StopRequested("stopped before the run began or before it reached a safe point") from None
    except LongtailError as error:
        watch.finish_for("stopped" if isinstance(error, StopRequested) else "failed", str(error))
        raise


@contextmanager
def actors(config: ClusterConfig, inputs: Inputs, start: Start | None = None) -> Iterator[Handles]:
    """Every actor of the run, constructed and answering."""
    with _slots_and_actors(config, inputs, start or nameless_start()) as (_, handles):
        yield handles


@contextmanager
def _slots_and_actors(config: ClusterConfig, inputs: Inputs, start: Start) -> Iterator[tuple[Any, Handles]]:
    """The slots' placement group, None where they ask for nothing, and the actors."""
    config, run_id = start.fitted(config), start.run_id
    await_names_free(run_id, config.coordinator.start_timeout_s)
    group = place_slots(config)
    handles: Handles = {}
    try:
        plans = plan_actors(config)
        lenders = {p.slot for p in plans if p.borrows_gpu}
        lent = {slot: first_gpu(group, slot, config) for slot in sorted(s for s in lenders if s is not None)}
        nodes = _nodes(config, group)
        for plan in plans:
            handles[plan.name] = _start(plan, config, start, group, lent, nodes)
        # Last, so that of several that cannot start the coordinator, which waits for the others, is named last.
        handles["coordinator"] = start_coordinator(config, inputs, run_id, handles, start.takeover)
        _await_all(handles, config.coordinator.start_timeout_s)
        if config.placement.colocated:
            require_shared(seats(handles, config.coordinator.start_timeout_s))
        yield group, handles
    finally:
        _stop_actors(handles)
        if group is not None:
            remove_placement_group(group)


@contextmanager
def policy_alone(config: ClusterConfig) -> Iterator[Any]:
    """The policy trainer, able to train, without the rest of a run; it writes no checkpoints."""
    start = nameless_start()
    config = start.fitted(config)
    handles = _start_policy(config, start)
    try:
        if config.placement.colocated:
            switched = RayCall(handles["policy"].switch_memory.remote(False), "policy", "switch_memory")
            switched.result(config.coordinator.call_timeout_s)
        yield handles["policy"]
    finally:
        _stop_actors(handles)


def _start_policy(config: ClusterConfig, start: Start, nodes: Sequence[str] = (), incarnation: str = "") -> Handles:
    """Alone, answering. `nodes`: of the slots, where a colocated one is to be. `incarnation` tells its name from
    that of a dead one, which may still have it."""
    (plan,) = (p for p in plan_actors(config) if p.name == "policy")
    handles = {"policy": _start(replace(plan, name=f"policy{incarnation}"), config, start, None, {}, nodes)}
    try:
        _await_all(handles, config.coordinator.start_timeout_s)
    except LongtailError:
        _stop_actors(handles)
        raise
    return handles


def _start(
    plan: ActorPlan,
    config: ClusterConfig,
    start: Start,
    group: Any,
    lent: Mapping[int, str],
    nodes: Sequence[str] = (),
) -> Any:
    env = actor_env(plan.threads) | (TRAINER_ENV if plan.kind in ("policy", "drafter") else {})
    env |= team_env(config) if plan.kind == "policy_team" else {}
    if plan.borrows_gpu and plan.slot is not None:
        env["CUDA_VISIBLE_DEVICES"] = lent[plan.slot]
    options: dict[str, Any] = {
        "name": actor_name(start.run_id, plan.name),
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
    shared = worker_selectors(config, nodes)
    if plan.kind == "policy" and shared:
        options["label_selector"] = shared[0]
    return remote_class(plan.kind, config).options(**options).remote(*_arguments(plan, config, start, shared))


def _arguments(plan: ActorPlan, config: ClusterConfig, start: Start, shared: list[dict[str, str]]) -> list[Any]:
    match plan.kind:
        case "policy":
            return [config, start.checkpoints]
        case "policy_team":
            place, env = config.placement, actor_env(config.policy.threads) | TRAINER_ENV | NCCL_PAIR_ENV
            selector = shared or role_selector(config, ROLES[plan.kind])
            each = WorkerPlace(place.policy_cpus, place.policy_gpus, selector, env)
            return [config, each, start.checkpoints]
    return [config] if plan.slot is None else [config, plan.slot]


def start_coordinator(
    config: ClusterConfig, inputs: Inputs, run_id: str, handles: Handles, takeover: Takeover | None
) -> Any:
    """Ray does not restart it: another one must know that it takes over. It lives on the driver's node, so that no cut
    cable comes between the two."""
    # Ray frees the name of a dead one in its own time
    incarnation = f"-{takeover.incarnation}" if takeover and not takeover.resumed else ""
    made = ray.remote(CoordinatorActor).options(
        name=actor_name(run_id, f"coordinator{incarnation}"),
        num_cpus=0,
        max_restarts=0,
        max_concurrency=4,
        runtime_env={"env_vars": actor_env(1)},
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    )
    others = {name: handle for name, handle in handles.items() if name != "coordinator"}
    return made.remote(config, inputs, others, takeover, run_id)


def _replaced(
    config: ClusterConfig,
    inputs: Inputs,
    start: Start,
    group: Any,
    handles: Handles,
    meters: EnergyMeters,
    takeover: Takeover,
    checkpoints: CheckpointPlan | None,
) -> Any:
    """Another coordinator, and with `checkpoints` another policy trainer before it, which goes on from there."""
    ray.kill(handles["coordinator"])
    if checkpoints is not None:
        ray.kill(handles["policy"])  # of a team, what is left of it
        again = replace(start, checkpoints=checkpoints)
        handles.update(_start_policy(config, again, _nodes(config, group), f"-{takeover.incarnation}"))
    handles["coordinator"] = coordinator = start_coordinator(config, inputs, start.run_id, handles, takeover)
    _await_all({"coordinator": coordinator}, config.coordinator.start_timeout_s)
    meters.tell(coordinator)
    return coordinator


def _nodes(config: ClusterConfig, group: Any) -> list[str]:
    """Where a colocated policy's workers have to be."""
    return slot_nodes(group, config.coordinator.start_timeout_s) if config.placement.colocated else []


def remote_class(kind: str, config: ClusterConfig) -> Any:
    """Calls in a concurrency group run beside the others: an `interrupt` overtakes the `train` it is meant for, and the
    policy trainer hands out what it published while it trains."""
    transfers = {TRANSFERS: transfer_threads(config)}
    groups = {
        "drafter": {CONTROL: 1},
        "policy": transfers,
        "policy_team": {**transfers, WORKERS: leader_threads(config)},
    }.get(kind)
    made = ray.remote(concurrency_groups=groups) if groups else ray.remote
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
                raise ServiceLostError(refs[ref], f"it could not start: {cause(error)}") from None
            except RayTaskError as error:  # of a team, whose workers start behind an actor that has
                raise ServiceLostError(refs[ref], f"it could not start: {error.cause}") from None
        if late:
            names = ", ".join(refs[ref] for ref in late)
            CONSOLE.print(f"waiting for {names}: {time.monotonic() - started:.0f} s of at most {timeout_s:.0f} s")
    if late:
        raise WaitTimeoutError(
            f"{names} did not start within {timeout_s:.0f} s: see the Ray logs, or raise coordinator.start_timeout_s"
        )


def _stop_actors(handles: Handles) -> None:
    """End the reward workers in an orderly way, then every actor."""
    if "reward" in handles:
        ray.wait([handles["reward"].close.remote()], timeout=5.0)
    for handle in handles.values():
        ray.kill(handle)
