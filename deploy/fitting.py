"""Whether a run's slots and its policy trainer fit a cluster's machines, as a pure function over what each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.placement import POLICY, ROLLOUT, bundles, role_label
from services.config.schema import ClusterConfig

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Room:
    """A machine: its Ray resources and labels."""

    name: str
    resources: Resources
    labels: Mapping[str, str]


def misfits(config: ClusterConfig, rooms: Sequence[Room]) -> Iterator[str]:
    """What is missing, one message each; nothing when everything can be placed at once on an empty cluster."""
    missing = [*_missing_totals(config, rooms), *_missing_labels(config, rooms)]
    if missing:
        yield from missing
        return
    slot, policy = _slot(config), _policy(config)
    takers = {role: [r for r in rooms if _takes(config, r, role)] for role in (ROLLOUT, POLICY)}
    worker = "the policy trainer" if config.placement.policy_workers == 1 else "a policy worker"
    for what, wanted, role in (("a slot", slot, ROLLOUT), (worker, policy, POLICY)):
        if not any(_count(wanted, room.resources) for room in takers[role]):
            yield _no_room(what, wanted, takers[role])
            return
    ways = list(_ways(config, takers[POLICY]))
    if not ways:
        yield (
            f"{config.placement.policy_workers} policy workers ({say(policy)} each) do not fit: {_inventory(rooms)}; "
            "lower placement.policy_workers, or add machines"
        )
        return
    best = max(_slots_beside(config, takers, way) for way in ways)
    if best < config.rollout.num_servers:
        yield (
            f"only {best} of {config.rollout.num_servers} slots ({say(slot)} each) fit beside {_trainer(config)} "
            f"with placement.strategy {config.placement.strategy}: {_inventory(rooms)}; "
            "lower rollout.num_servers, choose another placement.strategy, or add machines"
        )


def say(resources: Resources) -> str:
    named = {name: resources[name] for name in ("CPU", "GPU") if name in resources}  # Ray has no order
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items()) or "no CPU and no GPU"


def _missing_totals(config: ClusterConfig, rooms: Sequence[Room]) -> Iterator[str]:
    slots, place, workers = config.rollout.num_servers, config.placement, config.placement.policy_workers
    demand = {
        "CPU": (slots * place.cpus_per_slot + workers * place.policy_cpus, "cpus_per_slot", "policy_cpus"),
        "GPU": (slots * place.gpus_per_slot + workers * place.policy_gpus, "gpus_per_slot", "policy_gpus"),
    }
    fewer = ", placement.policy_workers" if workers > 1 else ""
    for resource, (wanted, *knobs) in demand.items():
        have = sum(room.resources.get(resource, 0.0) for room in rooms)
        if wanted > have:
            yield (
                f"{slots} slots and the policy trainer need {wanted:g} {resource}, the cluster has {have:g}; "
                f"lower rollout.num_servers{fewer}, placement.{knobs[0]} or placement.{knobs[1]}, or add machines"
            )


def _missing_labels(config: ClusterConfig, rooms: Sequence[Room]) -> Iterator[str]:
    for role in (ROLLOUT, POLICY):
        if not any(_takes(config, room, role) for room in rooms):
            yield (
                f"placement.role_labels is true, but no machine has the label {role_label(role)}=true: start Ray there "
                f"with --labels={role_label(role)}=true, or leave role_labels out"
            )


def _slot(config: ClusterConfig) -> Resources:
    return next(iter(bundles(config)), {})


def _policy(config: ClusterConfig) -> Resources:
    """Of each worker."""
    return {"CPU": config.placement.policy_cpus, "GPU": config.placement.policy_gpus}


def _takes(config: ClusterConfig, room: Room, role: str) -> bool:
    return not config.placement.role_labels or room.labels.get(role_label(role)) == "true"


def _count(wanted: Resources, has: Resources) -> int:
    """How often `wanted` fits. The smallest margin keeps 0.1 + 0.2 from being more than 0.3."""
    amounts = [has.get(name, 0.0) / amount for name, amount in wanted.items() if amount > 0]
    return int(min(amounts) + 1e-6) if amounts else 10**6


def _trainer(config: ClusterConfig) -> str:
    workers, each = config.placement.policy_workers, say(_policy(config))
    return f"the policy trainer ({each})" if workers == 1 else f"{workers} policy workers ({each} each)"


def _ways(config: ClusterConfig, rooms: Sequence[Room]) -> Iterator[Mapping[str, int]]:
    """Policy workers by machine: packed as Ray Train packs them, into each machine first and then where most fit."""
    counts = {room.name: _count(_policy(config), room.resources) for room in rooms}
    for first in counts:
        left, way = config.placement.policy_workers, Counter[str]()
        for name in sorted(counts, key=lambda name: (name != first, -counts[name])):
            way[name] = min(left, counts[name])
            left -= way[name]
        if not left and way[first]:
            yield way


def _slots_beside(config: ClusterConfig, takers: Mapping[str, Sequence[Room]], way: Mapping[str, int]) -> int:
    """How many slots can be placed when the policy workers are where `way` says."""
    slot, policy, wanted = _slot(config), _policy(config), config.rollout.num_servers
    counts = []
    for room in takers[ROLLOUT]:
        left = {n: a - policy.get(n, 0.0) * way.get(room.name, 0) for n, a in room.resources.items()}
        counts.append(_count(slot, left))
    if not slot:
        return wanted
    strategy = config.placement.strategy
    if strategy == "STRICT_PACK":
        return max(counts)
    if strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in counts)
    return sum(counts)


def _no_room(what: str, wanted: Resources, rooms: Sequence[Room]) -> str:
    def lacking(room: Room) -> dict[str, float]:
        short = {name: amount - room.resources.get(name, 0.0) for name, amount in wanted.items()}
        return {name: amount for name, amount in short.items() if amount > 0}

    closest = min(rooms, key=lambda room: (len(lacking(room)), sum(lacking(room).values())))
    return (
        f"{what} needs {say(wanted)} on one machine, and no machine has that; the closest, {closest.name}, has "
        f"{say(closest.resources)} and lacks {say(lacking(closest))}: lower the placement section's demand, "
        "or add a larger machine"
    )


def _inventory(rooms: Sequence[Room]) -> str:
    return "; ".join(f"{room.name} has {say(room.resources)}" for room in rooms)
