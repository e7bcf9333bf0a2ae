"""Fully sharded weights (FSDP2; Zhao et al. 2023, "PyTorch FSDP", and Rajbhandari et al. 2020, "ZeRO", stage 3).

Each worker keeps 1/size of every weight, of its gradient and of AdamW's two moments. A layer's weights are gathered for
its forward and again for its backward pass, or once for both; gradients are summed, not averaged: the weight of each
token is already that of the whole batch, see services/policy/loss.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.policy.logprobs import Scorer
from services.policy.team import Team

Placed = Callable[[nn.Module], None]


def place(scorer: Scorer, device: torch.device, placed: Placed) -> None:
    """Move the whole model to `device` in place, `placed` after each part."""
    for module in _parts(scorer):
        module.to(device)
        placed(module)


def shard(scorer: Scorer, team: Team, compute: torch.dtype | None, placed: Placed, reshard: bool) -> None:
    """In place, `placed` after each part. `compute` is what weights are gathered in; they stay float32 where they are
    kept, and gradients are summed in float32. Without `reshard` they stay gathered from the forward to the backward
    pass, and behind a forward pass that none follows until `let_go`: gathered parameters are not those that AdamW and
    checkpoints know."""
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else torch.float32)
    offload = CPUOffloadPolicy() if team.offload else OffloadPolicy()
    for module in _parts(scorer):
        fully_shard(module, mesh=team.mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a divided sum is an operation that gloo lacks
        placed(module)


def let_go(scorer: Scorer) -> None:
    """Of what a forward pass without a backward pass has left gathered."""
    for module in _parts(scorer):
        if isinstance(module, FSDPModule):
            module.reshard()


def _parts(scorer: Scorer) -> list[nn.Module]:
    """Each layer, and at last all with what is around them."""
    return [*scorer.model.base_model.layers, scorer]


def own(tensor: Tensor) -> Tensor:
    """This worker's shard of it, itself where it is whole; of a shard the memory, not a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Where `tensor` is sharded, every worker calls this at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy of the whole `value`, sharded and placed as `parameter` is; no worker waits for another."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device, copy=True)
    local = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    return like_shards_of(parameter, local.to(own(parameter).device, copy=True))


def like_shards_of(tensor: DTensor, local: Tensor) -> DTensor:
    """This worker's shard `local` of something laid out as `tensor`, on the device where it is: `from_local` would copy
    it to the mesh's GPU, where what is offloaded to host memory must not be."""
    return DTensor(local, tensor._spec, requires_grad=False)
