"""Whether numbers are finite, asked of every weight and hidden state that changes hands."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity. The smallest and the largest number show both, since a NaN makes both NaN; on a CPU that
    is 20 times faster than to look at each number by `isfinite`."""
    return _cannot_be_bad(tensor) or bool(_finite(tensor))


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those that hold NaN or infinity. Of tensors on a GPU it is asked once, not for each: the processor would
    wait for the GPU as often."""
    answers = {name: _finite(t) for name, t in tensors.items() if not _cannot_be_bad(t)}
    if not answers:
        return []
    together = torch.stack([a.to(next(iter(answers.values())).device) for a in answers.values()])
    return [name for name, fine in zip(answers, together.tolist(), strict=True) if not fine]


def _cannot_be_bad(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or not tensor.is_floating_point()


def _finite(tensor: Tensor) -> Tensor:
    smallest, largest = torch.aminmax(tensor)
    return torch.isfinite(smallest) & torch.isfinite(largest)
