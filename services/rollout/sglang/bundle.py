"""Named tensors on their way into SGLang's processes, as the memory that they share and where each lies in it.

Every tensor that is handed over by itself has its memory exported and opened by itself, and the tensors of one part are
seen in one buffer: 705 of them in six, with 64 layers. What is left is as many handles as there are buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from services.weights.parts import NamedTensors, Placed, bytes_of

# Number of its buffer, and where it lies there: a `Placed`'s fields as plain values, since SGLang's processes refuse to
# unpickle classes that they do not know.
View = tuple[int, tuple[Any, ...]]
Bundle = tuple[list[Tensor], list[View]]


def bundled(named: Iterable[tuple[str, Tensor]]) -> Bundle:
    """(buffers of bytes, what is seen in them). The buffers are the tensors' own memory where they are contiguous."""
    buffers, numbers, views = list[Tensor](), dict[int, int](), list[View]()
    for name, tensor in named:
        flat = tensor.detach().contiguous()
        storage = flat.untyped_storage()
        if storage._cdata not in numbers:
            numbers[storage._cdata] = len(buffers)
            buffers.append(bytes_of(storage))
        placed = Placed.of(name, flat, flat.storage_offset() * flat.element_size())
        views.append((numbers[storage._cdata], tuple(placed)))
    return buffers, views


def opened(bundle: Bundle) -> NamedTensors:
    """The tensors, in the buffers' memory."""
    buffers, views = bundle
    placed = [(number, Placed(*fields)) for number, fields in views]
    return [(p.name, p.seen_in(buffers[number])) for number, p in placed]
