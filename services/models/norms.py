"""transformers' RMS norms (Zhang and Sennrich 2019, arXiv 1910.07467) as one kernel where there is one.

Written out they are eight kernels forward and more backward, over rows in float32. In a deep, narrow model they are
about half of all launches of a training step, and much of what its kernels move.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

KINDS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def use_fused_norms(model: PreTrainedModel) -> None:
    """In place; names of weights stay as they are. On a CPU nothing changes. On a GPU values in half precision are
    rounded once, behind the weight, as serving engines do it, and not before it as well."""
    for module in model.modules():
        if type(module).__name__ in KINDS:
            module.__class__ = _fused(type(module))


@cache
def _fused(written_out: type[Any]) -> type[nn.Module]:
    class Fused(written_out):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            if one_kernel(x, self.weight):
                return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
            found: Tensor = super().forward(x)
            return found

    Fused.__name__ = f"Fused{written_out.__name__}"
    return Fused


def one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Mixed formats, as under autocast with weights in float32, would be written out by torch too."""
    return x.is_cuda and x.dtype == weight.dtype
