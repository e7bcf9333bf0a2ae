"""How policy versions reach the rollout servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.section import Section


class WeightsConfig(Section):
    """`object_store`: through host memory and Ray's object store. `collective`: from the policy trainer's device to the
    server's through torch.distributed, NCCL between two GPUs and gloo otherwise; the policy trainer keeps the published
    version on its device until the next one. Drafters always go through the object store."""

    transport: Literal["object_store", "collective"] = "object_store"
    # A version travels in parts of about so many bytes: one lies beside the model on either side meanwhile.
    part_bytes: int = Field(2**30, ge=1)
    connect_timeout_s: float = Field(20.0, gt=0)  # for the first transfer between the trainer and a server
    part_timeout_s: float = Field(15.0, gt=0)  # a part that takes longer than this ends its transfer
