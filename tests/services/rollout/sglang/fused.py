"""Models as SGLang holds them: q, k, v and gate, up in one parameter each, a drafter's names under "model.", and a
load_weights that takes what it knows and passes over the rest in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

PIECES = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip


def fused_name(name: str) -> tuple[str, int]:
    """The parameter that holds `name`, and which piece of it."""
    order, pieces = 0, []
    for piece in name.split("."):
        whole, at = PIECES.get(piece, (piece, 0))
        order = max(order, at)
        pieces.append(whole)
    return ".".join(pieces), order


class FusedModel(nn.Module):
    """`names`: the tensors of a version and their shapes. `prefix` "model." makes it a drafter, whose load_weights
    takes a name with the prefix for the same name without, as EAGLE-3's class does: a policy's layer 0 would land
    here. A head lies beside the model in either."""

    def __init__(self, names: Mapping[str, tuple[int, ...]], prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self._places: dict[str, tuple[str, int, int]] = {}  # name -> parameter, first row, rows
        rows: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in sorted(names.items(), key=lambda item: fused_name(item[0])):
            whole = ("" if name == "lm_head.weight" else prefix) + fused_name(name)[0]
            self._places[name] = (whole, rows.get(whole, 0), shape[0])
            rows[whole] = rows.get(whole, 0) + shape[0]
            shapes[whole] = (rows[whole], *shape[1:])
        for whole, shape in shapes.items():
            self._add(whole, nn.Parameter(torch.full(shape, 0.5), requires_grad=False))

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        module: nn.Module = self
        *path, last = name.split(".")
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = getattr(module, step)
        module.register_parameter(last, parameter)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            place = self._places.get(name.removeprefix(self.prefix))
            if place is not None:
                whole, first, count = place
                self.get_parameter(whole)[first : first + count].copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Copies, under the names of a version."""
        return {n: self.get_parameter(w)[i : i + k].clone() for n, (w, i, k) in self._places.items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())
