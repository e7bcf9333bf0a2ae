"""Tensors that go over as their memory are the tensors that were sent, however they lie in it."""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.rollout.sglang.bundle import bundled, opened
from services.weights.parts import pack, plan, unpack

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) and a.is_contiguous()


@given(st.lists(st.tuples(shapes, st.sampled_from(FORMATS)), max_size=8))
def test_what_lies_in_one_part_goes_over_as_one_buffer(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    """As a policy comes over a direct connection."""
    tensors = {f"t{i}": tensor(shape, dtype, i) for i, (shape, dtype) in enumerate(kinds)}
    for part in plan(tensors, 2**20).parts:
        named = unpack(part, pack(part, tensors, torch.device("cpu"), 5), 5)
        buffers, _ = bundle = bundled(named)
        assert len(buffers) == 1 and buffers[0].untyped_storage().data_ptr() == named[0][1].untyped_storage().data_ptr()
        found = dict(opened(bundle))
        assert found.keys() == {p.name for p in part.tensors}
        assert all(same(found[name], tensors[name]) for name in found)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(FORMATS)), max_size=6), st.data())
def test_views_of_any_memory_are_what_they_were(kinds: list[tuple[int, torch.dtype]], data: st.DataObject) -> None:
    """Slices, transposes, tensors that share memory, tensors of their own."""
    bases = [tensor((6, 4), dtype, i) for i, (_, dtype) in enumerate(kinds)]
    named = list[tuple[str, Tensor]]()
    for i, (kind, _) in enumerate(kinds):
        base = bases[data.draw(st.integers(0, i))]
        named.append((f"t{i}", [base, base[2:5], base.t(), base[:, 1:3]][kind]))
    found = opened(bundled(named))
    assert [name for name, _ in found] == [name for name, _ in named]
    assert all(same(mine, sent.contiguous()) for (_, mine), (_, sent) in zip(found, named, strict=True))


def test_it_is_pickled_without_a_class_that_sglang_refuses() -> None:
    """SGLang's processes unpickle nothing but Python's own types and torch's."""
    modules = set[str]()

    class Watching(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            modules.add(module.split(".", maxsplit=1)[0])
            return super().find_class(module, name)

    bundle = bundled([("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))])
    stream = io.BytesIO()
    ForkingPickler(stream).dump(bundle)
    stream.seek(0)
    assert dict(opened(Watching(stream).load()))["b"].dtype == torch.bfloat16
    assert modules <= {"torch", "builtins", "collections", "multiprocessing"}
