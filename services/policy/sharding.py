"""Fully sharded weights (FSDP2; Zhao et al. 2023, "PyTorch FSDP", and Rajbhandari et al. 2020, "ZeRO", stage 3).

Each worker keeps 1/size of every weight, of its gradient and of AdamW's two moments. A layer's weights are gathered for
its forward and again for its backward pass; gradients are summed, not averaged: the weight of each token is already
that of the whole batch, see services/policy/loss.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.policy.logprobs import Scorer
from services.policy.team import Team


def shard(scorer: Scorer, team: Team, compute: torch.dtype | None) -> None:
    """In place. `compute` is what weights are gathered in; they stay float32 where they are kept, and gradients are
    summed in float32. Nothing stays gathered between passes, so that parameters may be read and written at any time."""
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else torch.float32)
    offload = CPUOffloadPolicy() if team.offload else OffloadPolicy()
    layers = list(scorer.model.base_model.layers)
    for module in (*layers, scorer):
        fully_shard(module, mesh=team.mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a divided sum is an operation that gloo lacks


def whole(tensor: Tensor) -> Tensor:
    """Where `tensor` is sharded, every worker calls this at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy of the whole `value`, sharded and placed as `parameter` is; no worker waits for another."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device, copy=True)
    own = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    return like_shards_of(parameter, own.to(parameter.to_local().device, copy=True))


def like_shards_of(tensor: DTensor, own: Tensor) -> DTensor:
    """This worker's shard `own` of something laid out as `tensor`, on the device where it is: `from_local` would copy
    it to the mesh's GPU, where what is offloaded to host memory must not be."""
    return DTensor(own, tensor._spec, requires_grad=False)
