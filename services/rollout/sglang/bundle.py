"""Named tensors on their way into SGLang's processes, as the memory that they share and where each lies in it.

Every tensor that is handed over by itself has its memory exported and opened by itself, and the tensors of one part are
seen in one buffer: 705 of them in six, with 64 layers. What is left is as many handles as there are buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from services.weights.parts import NamedTensors

# Name, number of its buffer, number format as torch spells it, shape, first byte. Plain values: SGLang's processes
# refuse to unpickle classes that they do not know.
View = tuple[str, int, str, tuple[int, ...], int]
Bundle = tuple[list[Tensor], list[View]]


def bundled(named: Iterable[tuple[str, Tensor]]) -> Bundle:
    """(buffers of bytes, what is seen in them). The buffers are the tensors' own memory where they are contiguous."""
    buffers, numbers, views = list[Tensor](), dict[int, int](), list[View]()
    for name, tensor in named:
        flat = tensor.detach().contiguous()
        storage = flat.untyped_storage()
        if storage._cdata not in numbers:
            numbers[storage._cdata] = len(buffers)
            buffers.append(torch.empty(0, dtype=torch.uint8, device=flat.device).set_(storage))  # type: ignore[call-overload]
        dtype, first = str(flat.dtype).removeprefix("torch."), flat.storage_offset() * flat.element_size()
        views.append((name, numbers[storage._cdata], dtype, tuple(flat.shape), first))
    return buffers, views


def opened(bundle: Bundle) -> NamedTensors:
    """The tensors, in the buffers' memory."""
    buffers, views = bundle
    found: NamedTensors = []
    for name, number, dtype_name, shape, first in views:
        dtype = getattr(torch, dtype_name)
        seen = buffers[number][first : first + math.prod(shape) * dtype.itemsize]
        found.append((name, seen.view(dtype).view(shape)))
    return found
