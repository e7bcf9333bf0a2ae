"""`longtail why`: what a running run waits for, asked from outside. Changes nothing about the run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors as actor_table  # Ray's public state API needs a dashboard, a private Ray has none
from ray.exceptions import GetTimeoutError, RayError
from ray.util import placement_group_table

from deploy.fitting import say
from deploy.naming import NAMESPACE, actor_name
from deploy.session import joined
from deploy.stacks import stacks_of
from services.coordinator.diagnosis import Diagnosis, SlotHeld
from services.core.errors import ConfigError

ANSWER_S = 15.0

Actors = Mapping[str, Mapping[str, Any]]


def explain(run: str, address: str | None, stacks: bool) -> None:
    """`run`: a run id, or a run folder, which may know its address. Raises ConfigError when there is no such run."""
    run_id, kept_address = _identify(run)
    with joined(address or kept_address or "auto"):
        found = _actors_of(run_id)
        if not found:
            raise ConfigError(f"no run {run_id} on this Ray{_others()}: it is over, or elsewhere (--address)")
        for line in [*_ray_lines(found), *_coordinator_lines(run_id, found)]:
            print(line)
        for line in stacks_of(found) if stacks else ():
            print(line)


def _identify(run: str) -> tuple[str, str | None]:
    about = Path(run) / "run.json"
    if not about.is_file():
        return Path(run).name, None
    told = json.loads(about.read_text(encoding="utf-8"))
    where = told["starts"][-1].get("ray") or {}
    if where.get("auth_mode"):
        os.environ.setdefault("RAY_AUTH_MODE", where["auth_mode"])
    return told["run_id"], where.get("address")


def _actors_of(run_id: str) -> dict[str, Mapping[str, Any]]:
    """By the name within the run; of several with one name the one that lives."""
    prefix = actor_name(run_id, "")
    found = [a for a in actor_table().values() if a["Name"].startswith(prefix) and a["State"] != "DEAD"]
    return {a["Name"].removeprefix(prefix): a for a in sorted(found, key=lambda a: a["Name"])}


def _others() -> str:
    names = {a["Name"] for a in actor_table().values() if a["State"] != "DEAD"}
    runs = {m[1] for n in names if (m := re.fullmatch(r"longtail-(.+)-policy", n))}
    return f"; there are {', '.join(sorted(runs))}" if runs else ""


# ---------------------------------------------------------------------------- what Ray knows


def _ray_lines(found: Actors) -> Iterator[str]:
    yield "actors:"
    for name, actor in found.items():
        where = f"{actor['Address']['IPAddress']}, process {actor['Pid']}" if actor["State"] == "ALIVE" else "nowhere"
        restarts = f", {actor['NumRestarts']} restarts" if actor["NumRestarts"] else ""
        yield f"  {name}: {actor['State'].lower().replace('_', ' ')}, {where}{restarts}"
    yield from _pending_lines()


def _pending_lines() -> Iterator[str]:
    for group in placement_group_table().values():
        if group["state"] in ("PENDING", "RESCHEDULING", "PREPARED"):
            unplaced = [b for i, b in group["bundles"].items() if not group["bundles_to_node_id"].get(i)]
            yield f"waits for room: {len(unplaced)} slots of {say(unplaced[0]) if unplaced else 'a group'}; " + _free()


def _free() -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    return f"unused are {say({n: free.get(n, 0.0) for n in total})} of {say(total)}"


# ---------------------------------------------------------------------------- what the coordinator knows


def _coordinator_lines(run_id: str, found: Actors) -> list[str]:
    names = [name for name in found if re.fullmatch(r"coordinator(-\d+)?", name)]
    if not names:
        return ["there is no coordinator (yet): the run is starting, or its last one died"]
    handle = ray.get_actor(actor_name(run_id, names[-1]), namespace=NAMESPACE)
    try:
        diagnosis: Diagnosis = ray.get(handle.diagnosis.remote(), timeout=ANSWER_S)
    except GetTimeoutError:
        return [f"the coordinator does not answer within {ANSWER_S:.0f} s: see its stack with --stacks"]
    except RayError as error:
        return [f"the coordinator does not answer: {str(error).splitlines()[0]}"]
    return list(diagnosis_lines(diagnosis))


def diagnosis_lines(seen: Diagnosis) -> Iterator[str]:
    yield (
        f"step {seen.step} of {seen.num_steps}, {seen.phase}; published: policy version {seen.policy_version}, drafter "
        f"version {seen.drafter_version}"
    )
    yield "slots:"
    yield from (f"  {_slot_line(slot)}" for slot in seen.slots)
    yield "asked and not answered:" if seen.asked else "nobody is asked for anything"
    for call in seen.asked:
        yield f"  {call.what}: {call.waited_s:.1f} s of at most {call.allowed_s:.0f} s"
    yield "last answers:"
    for owner, seconds in sorted(seen.silent_s.items()):
        yield f"  {owner}: {seconds:.1f} s ago"


def _slot_line(slot: SlotHeld) -> str:
    held = "" if slot.expires_s is None else f", lease ends in {slot.expires_s:.1f} s without a heartbeat"
    serves = (
        "its server serves nothing yet"
        if slot.served is None
        else f"its server serves policy version {slot.served.policy}, drafter version {slot.served.drafter}"
    )
    return f"slot {slot.slot}: {slot.state}, epoch {slot.epoch}{held}; {serves}"
