"""Parts: every number format and shape comes back bit for bit, and a broken part is never taken for a good one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import TransferError, WeightError
from services.weights.parts import ALIGN, Manifest, Part, Placed, pack, plan, sealed_bytes, unpack
from services.weights.rendezvous import part_mark

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
CPU = torch.device("cpu")


@st.composite
def versions(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    for n in range(draw(st.integers(1, 8))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + size))
        tensor = (data % 2 if dtype == torch.bool else data).view(dtype).view(shape)
        found[f"{n}.weight"] = tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(versions(), st.integers(1, 2000))
def test_what_is_packed_comes_out_bit_for_bit(tensors: dict[str, torch.Tensor], part_bytes: int) -> None:
    manifest = plan(tensors, part_bytes)
    assert manifest.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
    found: dict[str, torch.Tensor] = {}
    for n, part in enumerate(manifest.parts):
        assert part.num_bytes <= part_bytes or len(part.tensors) == 1
        assert all(placed.start % ALIGN == 0 for placed in part.tensors)
        buffer = pack(part, tensors, CPU, part_mark("t", n))
        assert len(buffer) == sealed_bytes(part)
        found |= dict(unpack(part, buffer.clone(), part_mark("t", n)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert as_bytes(found[name]) == as_bytes(tensor)


@given(st.integers(0, 2**32), st.integers(0, 2999))
def test_a_changed_byte_breaks_the_seal(seed: int, place: int) -> None:
    tensors = {"w": torch.randint(0, 256, (3000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))}
    (part,) = plan(tensors, 10**6).parts
    buffer = pack(part, tensors, CPU, part_mark("t", 0))
    unpack(part, buffer, part_mark("t", 0))
    buffer[place] += 1
    with pytest.raises(TransferError, match="3000 bytes arrived damaged or not at all"):
        unpack(part, buffer, part_mark("t", 0))


def test_an_earlier_part_in_the_buffer_is_not_taken_for_the_next() -> None:
    tensors = {"w": torch.ones(100)}
    (part,) = plan(tensors, 10**6).parts
    buffer = pack(part, tensors, CPU, part_mark("first", 0))
    for mark in (part_mark("second", 0), part_mark("first", 1)):
        with pytest.raises(TransferError):
            unpack(part, buffer, mark)


def test_nothing_makes_no_part_and_unknown_formats_are_named() -> None:
    assert plan({}, 100) == Manifest(()) and Manifest(()).num_bytes == 0
    part = Part(8, (Placed("w", "float3", (2,), 0, 8),))
    with pytest.raises(WeightError, match="number format 'float3'"):
        unpack(part, pack(Part(8, ()), {}, CPU, 1), 1)
