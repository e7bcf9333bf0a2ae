"""The policy trainer as a team of workers (Ray Train V2, FSDP2), behind the same calls as actors/policy.py.

    coordinator -> this actor, the leader -> boxes -> workers' train loops -> answers -> this actor -> coordinator

The leader computes nothing. Its team is lost as a whole with any of its workers: every open call and every later one
says so, and the run goes back to its last checkpoint with another team. Ray Train restarts nothing by itself, because
the coordinator would not know that the policy is another one. When the leader ends, its team does: it owns the team.

Tensors pass through the leader's machine once: a worker's answer lies in the object store, and is copied there into the
answer of the leader, which is what the coordinator has a reference to.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import fsspec
import ray
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer

from actors.energy import GpuSeat
from actors.mailbox import Command, Mailbox
from actors.policy_worker import TAKE_S, TRANSFER_BOX, serve, work_box
from services.config.schema import ClusterConfig
from services.core.checkpoints import CheckpointNote, CheckpointPlan
from services.core.errors import LongtailError, ServiceLostError, WaitTimeoutError
from services.core.types import HiddenStateChunk, MemorySwitch, PolicyStepReport, TrainBatch
from services.weights.rendezvous import Invitation, Offer

NAME = "policy"


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Of each worker: its share of Ray's resources, Ray's label selector, and its environment. `selector`: one for all,
    or a list of one for each."""

    cpus: float
    gpus: float
    selector: dict[str, str] | list[dict[str, str]]
    env: dict[str, str]


class PolicyTeamActor:
    def __init__(self, config: ClusterConfig, place: WorkerPlace, checkpoints: CheckpointPlan | None = None) -> None:
        self._config = config
        self._boxes = [work_box(rank) for rank in range(config.placement.policy_workers)]
        self._mailbox = Mailbox([*self._boxes, TRANSFER_BOX])
        self._ready = False
        self._self = ray.get_runtime_context().current_actor
        settings = {
            "config": config,
            "checkpoints": checkpoints,
            "leader": self._self,
            "transfer_threads": transfer_threads(config),
        }
        trainer = torch_trainer(config, place, settings)
        threading.Thread(target=self._fit, args=(trainer,), name="policy team", daemon=True).start()

    def process_id(self) -> int:
        if not self._ready:
            self._ask("steps_done", timeout_s=self._config.coordinator.start_timeout_s)
            self._ready = True
        return os.getpid()

    def gpu_seat(self) -> GpuSeat:
        """Of all workers where one machine has them; a seat is of one machine, so of several it has no GPU, and energy
        is told as not measured."""
        (seats,) = self._ask("seats")
        one = len({seat.node for seat in seats}) == 1
        return GpuSeat(seats[0].node, tuple(e for seat in seats for e in seat.entries) if one else ())

    def train_step(self, batch: TrainBatch) -> tuple[PolicyStepReport, HiddenStateChunk, list[Any]]:
        report, chunk, hidden = self._ask("train_step", batch)
        return report, chunk, hidden

    def steps_done(self) -> int:
        (steps,) = self._ask("steps_done")
        return int(steps)

    def publish(self) -> tuple[int, dict[str, Any]]:
        version, tensors = self._ask("publish")
        return version, tensors

    def switch_memory(self, release: bool) -> MemorySwitch | None:
        switch: MemorySwitch | None
        (switch,) = self._ask("switch_memory", release)
        return switch

    def restored(self) -> tuple[CheckpointNote | None, Any, Any]:
        note, live, served = self._ask("restored")
        return note, live, served

    def checkpoint(self, note: CheckpointNote, live: Any, served: Any) -> None:
        self._ask("checkpoint", note, live, served)

    def flush(self, timeout_s: float) -> None:
        self._ask("flush", timeout_s)

    def offer(self) -> tuple[int, Offer, dict[str, Any]]:
        version, offer, head = self._ask("offer", self._self)
        return version, offer, head

    def send(self, version: int, invitation: Invitation) -> None:
        self._ask("send", version, invitation, boxes=[TRANSFER_BOX])

    def copy_of(self, version: int) -> tuple[int, dict[str, Any]]:
        held, tensors = self._ask("copy_of", version, boxes=[TRANSFER_BOX])
        return held, tensors

    # ------------------------------------------------------------------ for its workers

    def take(self, box: str) -> Command | None:
        return self._mailbox.take(box, TAKE_S)

    def answer(self, box: str, number: int, *result: Any) -> None:
        self._mailbox.answer(box, number, result)

    def refuse(self, number: int, error: LongtailError) -> None:
        self._mailbox.refuse(number, error)

    def failed(self, error: LongtailError) -> None:
        """A worker could not begin."""
        self._mailbox.close(error)

    # ------------------------------------------------------------------ inside

    def _ask(
        self, method: str, *arguments: Any, boxes: list[str] | None = None, timeout_s: float | None = None
    ) -> tuple[Any, ...]:
        limit_s = timeout_s or self._config.coordinator.call_timeout_s
        future = self._mailbox.post(boxes or self._boxes, method, ray.put(arguments))
        try:
            return future.result(limit_s)
        except TimeoutError:
            raise WaitTimeoutError(f"the policy workers did not answer {method} within {limit_s:.0f} s") from None

    def _fit(self, trainer: TorchTrainer) -> None:
        """Returns when the team has ended, for whatever reason."""
        reason = "its workers ended"
        try:
            trainer.fit()
        except (TrainingFailedError, RayError) as error:
            reason = _reason(error)
        finally:
            self._mailbox.close(ServiceLostError(NAME, reason))


def transfer_threads(config: ClusterConfig) -> int:
    """One for each server, so that one that is silent keeps no other from its weights, and one for a copy."""
    return config.rollout.num_servers + 1


def leader_threads(config: ClusterConfig) -> int:
    """Of calls that workers make: each waits in a box of its own, and some answer meanwhile."""
    return 2 * config.placement.policy_workers + transfer_threads(config) + 2


def torch_trainer(config: ClusterConfig, place: WorkerPlace, settings: dict[str, Any]) -> TorchTrainer:
    """What Ray Train would keep of a run stays in memory: checkpoints are Longtail's own."""
    wanted = {name: amount for name, amount in (("CPU", place.cpus), ("GPU", place.gpus)) if amount}
    return TorchTrainer(
        serve,
        train_loop_config=settings,
        torch_config=TorchConfig(
            # Checkpoints and offloaded weights are gathered on CPUs.
            backend="cpu:gloo,cuda:nccl" if place.gpus else "gloo",
            timeout_s=int(config.coordinator.call_timeout_s) + 1,
        ),
        scaling_config=ScalingConfig(
            num_workers=config.placement.policy_workers,
            use_gpu=place.gpus > 0,
            resources_per_worker=wanted,
            label_selector=place.selector or None,
        ),
        run_config=RunConfig(
            name=NAME,
            storage_path="/longtail",
            storage_filesystem=PyFileSystem(FSSpecHandler(fsspec.filesystem("memory"))),
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0),
            worker_runtime_env={"env_vars": place.env},
        ),
    )


def _reason(error: Exception) -> str:
    """The first worker's that failed, and its last line: Ray puts a whole traceback into the message."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank = min(error.worker_failures)
        return f"worker {rank}: {_last_line(error.worker_failures[rank])}"
    return _last_line(error)


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:300]
