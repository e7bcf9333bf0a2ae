"""The configuration section `placement`: how actors meet machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from services.config.section import Section

ROUNDING = 1e-4  # of Ray's parts of a GPU


class PlacementConfig(Section):
    """How actors meet machines. `mode: local` runs every service in this process (tests); `ray` on a cluster.
    `policy_cpus` and `policy_gpus` are those of each of the `policy_workers`, which hold the policy in equal parts.
    `policy: colocated` puts the workers on the slots' GPUs, where they and the rollout servers take turns:
    `gpus_per_slot` and `policy_gpus` are then the parts of one GPU that Ray counts for each, and whoever's turn it is
    has the memory, or each keeps its own (`resident`)."""

    mode: Literal["ray", "local"] = "ray"
    address: str | None = None  # None: a private Ray on this machine
    cpus_per_slot: float = Field(0.5, ge=0)
    # Processor cores that slots without a GPU share: idle slots train on those that nobody generates on. None: this
    # machine's in a private Ray; on a cluster as if every slot had its own.
    cores: int | None = Field(None, ge=1)
    gpus_per_slot: float = Field(0.0, ge=0)
    policy: Literal["split", "colocated"] = "split"  # GPUs of its own, or those of the slots in turns
    # Of a colocated policy, on GPUs with room for both sides at once: turns move nothing to host memory and back.
    resident: bool = False
    policy_workers: int = Field(1, ge=1)
    policy_cpus: float = Field(0.5, ge=0)
    policy_gpus: float = Field(0.0, ge=0)
    # How Ray spreads slots over nodes; with STRICT_SPREAD a slot whose node is lost waits for a node, it never moves
    # in with another one.
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    # Slots only on Ray nodes labelled longtail.io/rollout=true, the policy trainer on longtail.io/policy=true, the
    # coordinator and the reward workers on longtail.io/head=true. For clusters whose nodes differ by role.
    role_labels: bool = False
    # Of a private Ray: holds drafters, policies and hidden states of a few steps.
    object_store_bytes: int = Field(512 * 2**20, ge=2**27)

    @property
    def colocated(self) -> bool:
        return self.policy == "colocated"

    @property
    def lends_memory(self) -> bool:
        """Whether the side whose turn it is has the memory of the slots' GPUs alone."""
        return self.colocated and not self.resident

    @property
    def policy_lies_apart(self) -> bool:
        """Whether slots and policy never come to one GPU: less than a whole one shares it with others."""
        return not self.colocated and self.gpus_per_slot > 0 and self.policy_gpus >= 1

    @property
    def slots_lie_apart(self) -> bool:
        """Whether no two slots can come to one GPU."""
        return self.gpus_per_slot > 0.5

    def _fit_one_gpu(self, slots: int) -> bool:
        return slots * self.gpus_per_slot + self.policy_workers * self.policy_gpus <= 1 + ROUNDING

    def sharing_problems(self, slots: int) -> Iterator[str]:
        """Of a colocated policy."""
        both = self.gpus_per_slot + self.policy_gpus
        if bool(self.gpus_per_slot) != bool(self.policy_gpus):
            yield (
                "placement.policy: colocated shares a GPU between a slot and a policy worker: set "
                "placement.gpus_per_slot and placement.policy_gpus above 0, or both to 0 for CPUs"
            )
        elif both > 1 + ROUNDING:
            yield (
                f"placement.policy: colocated: gpus_per_slot {self.gpus_per_slot:g} and policy_gpus "
                f"{self.policy_gpus:g} are more than the one GPU that they share: lower them, for one to 0.6 and 0.4"
            )
        elif self.policy_workers > 1 and both and both < 1 - ROUNDING:
            yield (
                f"placement.policy: colocated: gpus_per_slot and policy_gpus are {both:g} of a GPU, so that two "
                "policy workers could come to one, which NCCL refuses: make them 1 together"
            )
        elif self.gpus_per_slot and not (self.slots_lie_apart or self._fit_one_gpu(slots)):
            yield (
                f"placement.policy: colocated: of {slots} slots of {self.gpus_per_slot:g} GPU two could come to one "
                "GPU and a policy worker to another: raise gpus_per_slot above 0.5, for one to 0.6 and policy_gpus to "
                "0.4, or lower both until all fit one GPU"
            )
        if self.gpus_per_slot and self.policy_workers > slots:
            yield (
                f"placement.policy_workers {self.policy_workers} are more than the {slots} slots whose GPUs they "
                "share: lower it, or raise rollout.num_servers"
            )
