"""Asks every node of the connected Ray what it has, and tells what a run would miss there."""

from __future__ import annotations

from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy import node_facts
from deploy.fitting import Room
from deploy.node_facts import Question, Seen, look
from deploy.preflight import Finding, Machine, errors, findings
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.models.files import model_dir

ANSWER_S = 60.0  # a node starts a worker process for the question


def question_of(config: ClusterConfig, at_driver: bool) -> Question:
    """The run folder is the driver's; a spill folder is every machine's."""
    folders = [str(config.run.dir)] if at_driver else []
    folders += [str(f) for f in (config.drafter.spill_dir,) if f is not None]
    model = None if config.model.path == "pocket" else str(model_dir(config.model.path))
    metrics = config.coordinator.metrics
    ports = (metrics.port,) if metrics is not None and metrics.port else ()
    return Question(model, tuple(folders), ports)


def survey(config: ClusterConfig) -> list[Machine]:
    """Every node that is alive; the driver's looks at itself."""
    home = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = {node["NodeID"]: _ask(node["NodeID"], config) for node in nodes if node["NodeID"] != home}
    machines = []
    for node in nodes:
        room = Room(node["NodeManagerAddress"], node["Resources"], node.get("Labels") or {})
        if node["NodeID"] == home:
            machines.append(Machine(room, look(question_of(config, at_driver=True)), driver=True))
        else:
            machines.append(_answer(room, asked[node["NodeID"]]))
    return machines


def _ask(node: str, config: ClusterConfig) -> Any:
    cloudpickle.register_pickle_by_value(node_facts)  # a machine without Longtail says that it has none
    try:
        asking = ray.remote(look).options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )
        return asking.remote(question_of(config, at_driver=False))
    finally:
        cloudpickle.unregister_pickle_by_value(node_facts)


def _answer(room: Room, asked: Any) -> Machine:
    try:
        seen: Seen = ray.get(asked, timeout=ANSWER_S)
    except GetTimeoutError:
        return Machine(room, None, f"no answer within {ANSWER_S:.0f} s")
    except RayError as error:
        return Machine(room, None, str(error).strip().splitlines()[-1])
    return Machine(room, seen)


def require_fit(config: ClusterConfig) -> list[Finding]:
    """The warnings. Raises ConfigError with everything that is missing."""
    found = findings(config, survey(config))
    missing = errors(found)
    if missing:
        lines = [str(finding) for finding in missing]
        raise ConfigError("this run cannot start here:\n  " + "\n  ".join(lines))
    return found
