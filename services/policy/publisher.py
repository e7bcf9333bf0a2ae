"""Publishing for direct connections: the weights stay on the policy trainer's device, and receivers fetch them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from services.config.schema import ClusterConfig
from services.models.target import EMBED, HEAD
from services.policy.service import PolicyService
from services.weights.rendezvous import Invitation, Offer
from services.weights.send import Outbox


class Publisher:
    """`offer` is called where the policy is trained; `send` and `copy_of` in other threads meanwhile.

    `head_names`: the tensors that drafter trainers take from a policy; they get them on the CPU."""

    def __init__(self, service: PolicyService, outbox: Outbox, head_names: tuple[str, ...]) -> None:
        self._service, self._outbox, self._head_names = service, outbox, head_names

    def offer(self, sender: Any) -> tuple[int, Offer, dict[str, Tensor]]:
        """(policy_version, offer, tensors for drafter trainers). `sender` is how a receiver calls `send` here. Raises
        WeightError for a policy that is not finite."""
        self._outbox.clear()
        version, tensors = self._service.publish(self._service.device)
        head = {name: tensors[name].to("cpu") for name in self._head_names if name in tensors}
        return version, self._outbox.hold(version, tensors, sender), head

    def send(self, version: int, invitation: Invitation) -> None:
        self._outbox.send(version, invitation)

    def copy_of(self, version: int) -> dict[str, Tensor]:
        return self._outbox.copy_of(version)


def build_publisher(config: ClusterConfig, service: PolicyService) -> Publisher:
    head = (EMBED, HEAD) if config.speculation.learned else ()
    return Publisher(service, Outbox(config.weights, service.device), head)
