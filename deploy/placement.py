"""Which actor goes where with which resources: a plan from config.

One placement-group bundle per slot holds its rollout server and its drafter trainer, which take turns on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from deploy.inputs import needs_drafter
from services.config.schema import ClusterConfig, NativeEngine

HEAD, ROLLOUT, POLICY = "head", "rollout", "policy"  # roles of Ray nodes
# Where each kind of actor belongs.
ROLES = {"rollout": ROLLOUT, "drafter": ROLLOUT, "policy": POLICY, "policy_team": POLICY, "reward": HEAD}


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """`kind` is rollout, drafter, policy, policy_team or reward; `slot` is None outside slots. `borrows_gpu`: it works
    on the first GPU of its slot's rollout server without asking Ray for a share."""

    name: str
    kind: str
    slot: int | None
    cpus: float
    gpus: float
    threads: int
    restarts: int
    borrows_gpu: bool = False


def plan_actors(config: ClusterConfig) -> list[ActorPlan]:
    """Every actor but the coordinator, which itself computes nothing and asks for no CPU."""
    restarts = config.coordinator.max_restarts
    engine = config.rollout.engine
    server_threads = engine.threads if isinstance(engine, NativeEngine) else 1
    drafts = needs_drafter(config)
    share = slot_share(config)
    plans = []
    for slot in range(config.rollout.num_servers):
        plans.append(
            ActorPlan(f"rollout-{slot}", "rollout", slot, share.cpus, share.rollout_gpus, server_threads, restarts)
        )
        if drafts:
            name, threads = f"drafter-{slot}", config.drafter.threads
            plans.append(
                ActorPlan(name, "drafter", slot, share.cpus, share.drafter_gpus, threads, restarts, share.borrows)
            )
    return [*plans, _policy_plan(config), ActorPlan("reward", "reward", None, 0.0, 0.0, 1, restarts)]


def _policy_plan(config: ClusterConfig) -> ActorPlan:
    """Its weights die with it, so a restarted one would silently begin again from the first policy. The leader of a
    team computes nothing."""
    place, threads = config.placement, config.policy.threads
    if config.policy_in_team:
        return ActorPlan("policy", "policy_team", None, 0.0, 0.0, 1, 0)
    return ActorPlan("policy", "policy", None, place.policy_cpus, place.policy_gpus, threads, 0)


@dataclass(frozen=True, slots=True)
class SlotShare:
    """Resources of a slot's actors: `cpus` of each, GPUs of the rollout server and of the drafter trainer."""

    cpus: float
    rollout_gpus: float
    drafter_gpus: float

    @property
    def borrows(self) -> bool:
        return self.rollout_gpus > 1 and not self.drafter_gpus


def slot_share(config: ClusterConfig) -> SlotShare:
    """Up to one GPU is halved between the two. Of several, which Ray hands out whole only, the rollout server takes all
    and the drafter trainer works on its first one."""
    place = config.placement
    if not needs_drafter(config):
        return SlotShare(place.cpus_per_slot, place.gpus_per_slot, 0.0)
    if place.gpus_per_slot > 1:
        return SlotShare(place.cpus_per_slot / 2, place.gpus_per_slot, 0.0)
    return SlotShare(place.cpus_per_slot / 2, place.gpus_per_slot / 2, place.gpus_per_slot / 2)


def bundles(config: ClusterConfig) -> list[dict[str, float]]:
    """One bundle per slot; a resource that is not asked for is left out, as Ray wants it."""
    wanted = {"CPU": config.placement.cpus_per_slot, "GPU": config.placement.gpus_per_slot}
    bundle = {name: amount for name, amount in wanted.items() if amount > 0}
    return [dict(bundle) for _ in range(config.rollout.num_servers)] if bundle else []


def role_label(role: str) -> str:
    """The label of a Ray node that takes actors of this role. One label each, because a node may have several roles."""
    return f"longtail.io/{role}"


def role_selector(config: ClusterConfig, role: str) -> dict[str, str]:
    """Ray's label selector; empty where any node will do. Without it Ray packs slots onto the policy trainer's node
    when they fit there, and the trainer finds no node that is large enough."""
    return {role_label(role): "true"} if config.placement.role_labels else {}


def actor_env(threads: int) -> dict[str, str]:
    """Environment of one actor's process: its numeric libraries keep to its threads (several actors share few cores
    here), and tensors that it returns lie in the object store as they are, so that a receiver reads them in place.
    Pickled, as Ray does by default, the weights of a 7B model would pass through two more copies on either side.

    OpenMP's threads sleep where they wait for each other. By default they spin, and where other processes want the
    cores too the one that spins keeps the one it waits for from running: a train step of seconds took minutes."""
    count = str(threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        **dict.fromkeys(names, count),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    }


# Batches of ever new lengths leave holes in torch's fixed segments; these grow and shrink. Not for rollout servers:
# they hand weights to their engine as CUDA memory of another process.
TRAINER_ENV = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def team_env(config: ClusterConfig) -> dict[str, str]:
    """Of a policy team's leader: Ray Train's own settings. Workers stay in the run's working directory, to which paths
    of the config are relative; a node about to be taken away is the coordinator's affair."""
    return {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{config.coordinator.start_timeout_s:g}",
    }


def machine_cpus() -> int:
    return os.cpu_count() or 1
