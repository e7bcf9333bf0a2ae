"""One worker of a policy team: Ray Train's train loop, which lives as long as the team and serves its commands.

All workers run the same command at the same time; the first of them answers for all, and hands out what is published in
threads of their own meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from ray.train.torch import get_device

from actors.clients import WORKERS
from actors.energy import GpuSeat, own_seat
from services.config.schema import ClusterConfig
from services.core.checkpoints import CheckpointPlan
from services.core.errors import LongtailError
from services.policy.publisher import Publisher, build_publisher
from services.policy.service import PolicyService, build_policy_service
from services.policy.team import Team, joined_team

TAKE_S = 20.0  # between two questions of a worker that has nothing to do
LEADER_S = 300.0  # for an answer of the leader, which does little else


def work_box(rank: int) -> str:
    return f"worker {rank}"


TRANSFER_BOX = "transfers"


@dataclass(frozen=True)
class Member:
    """A worker's part of each command. `publisher` is of the one that leads."""

    service: PolicyService
    team: Team
    publisher: Publisher | None

    def run(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        result = getattr(self, method)(*arguments) if hasattr(self, method) else self._of_service(method, arguments)
        return result if isinstance(result, tuple) else (result,)

    def _of_service(self, method: str, arguments: tuple[Any, ...]) -> Any:
        result = getattr(self.service, method)(*arguments)
        return result if self.team.leads else None

    def steps_done(self) -> int:
        return self.service.steps_done

    def seats(self) -> list[GpuSeat]:
        return self.team.gathered(own_seat())

    def offer(self, sender: Any) -> Any:
        if self.publisher is not None:
            return self.publisher.offer(sender)
        self.service.publish(self.service.device)
        return None

    def send(self, *arguments: Any) -> None:
        assert self.publisher is not None
        self.publisher.send(*arguments)

    def copy_of(self, version: int) -> tuple[int, Any]:
        assert self.publisher is not None
        return version, self.publisher.copy_of(version)


def serve(settings: dict[str, Any]) -> None:
    """Ends with an error alone, which ends the team; its leader's end ends this process."""
    config: ClusterConfig = settings["config"]
    leader = settings["leader"]
    try:
        member = _join(config, settings["checkpoints"])
    except LongtailError as error:
        ray.get(leader.failed.options(concurrency_group=WORKERS).remote(error), timeout=LEADER_S)
        raise
    if member.publisher is not None:
        for number in range(settings["transfer_threads"]):
            arguments = (leader, TRANSFER_BOX, member.run)
            threading.Thread(target=_hand_out, args=arguments, name=f"transfer {number}", daemon=True).start()
    _obey(leader, work_box(member.team.rank), member.run)


def _join(config: ClusterConfig, checkpoints: CheckpointPlan | None) -> Member:
    # By its number: several workers of one machine see each other's GPUs.
    device = torch.device("cpu") if config.model.device == "cpu" else get_device()
    team = joined_team(device, config.policy.optimizer_offload)
    service = build_policy_service(config, checkpoints=checkpoints, team=team)
    return Member(service, team, build_publisher(config, service) if team.leads else None)


def _hand_out(leader: Any, box: str, run: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    try:
        _obey(leader, box, run)
    except RayActorError:
        return  # the leader has ended, and this process ends with it


def _obey(leader: Any, box: str, run: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """What a command raises of Longtail's own errors is its answer: each worker finds the same fault in a batch before
    they begin, and the first alone writes and publishes. Anything else ends this worker."""
    take, answer, refuse = (
        getattr(leader, name).options(concurrency_group=WORKERS) for name in ("take", "answer", "refuse")
    )
    while True:
        command = ray.get(take.remote(box), timeout=LEADER_S)
        if command is None:
            continue
        try:
            result = run(command.method, ray.get(command.arguments, timeout=LEADER_S))
        except LongtailError as error:
            refuse.remote(command.number, error)
        else:
            answer.remote(box, command.number, *result)
