"""Loading a version into SGLang's own model objects; runs inside SGLang's processes (see `plugin`).

Three things are stricter than SGLang's own path: a load reaches one model only (its default hands a policy to the
draft first, and an EAGLE-3 draft takes the target's layer 0 for its own), every name must be known (shapes are checked
before anything is sent), and numbers must be finite. A refused part leaves the weights as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.core.errors import WeightError
from services.models.drafter import OWN_HEAD
from services.models.finite import not_finite

PREFIX = "longtail"
VERSION = "longtail_version"  # attribute of SGLang's model; None before the first load
PART_BYTES = 2 * 2**30
TORN = -1  # between the parts of a version, and for good when a later one is refused or never comes


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Travels in SGLang's `load_format` string: what kind of version, which one, and which part of how many."""

    kind: str
    version: int
    part: int
    parts: int

    @property
    def last(self) -> bool:
        return self.part == self.parts - 1

    def text(self) -> str:
        return f"{PREFIX}/{self.kind}/{self.version}/{self.part}/{self.parts}"


def parse_order(load_format: str | None) -> LoadOrder | None:
    """None for a load that is not ours."""
    if load_format is None or not load_format.startswith(PREFIX + "/"):
        return None
    _, kind, version, part, parts = load_format.split("/")
    return LoadOrder(kind, int(version), int(part), int(parts))


def served_version(model: Any) -> int | None:
    version: int | None = getattr(model, VERSION, None)
    return version


def load_part(model: Any, order: LoadOrder, named: Iterable[tuple[str, Tensor]]) -> None:
    """Check and load one part. The model has the new version with the last part; before that it is TORN, neither the
    old nor the new. Raises WeightError, having loaded nothing of this part."""
    tensors = dict(named)
    _check(model, order.kind, tensors)
    if any(t.is_cuda for t in tensors.values()):
        torch.cuda.synchronize()  # no forward pass under way may read half-written weights (row 36)
    model.load_weights(list(tensors.items()))
    setattr(model, VERSION, order.version if order.last else TORN)


def _check(model: Any, kind: str, tensors: Mapping[str, Tensor]) -> None:
    """Every tensor finds its parameters in `model`, is finite, and there is at least one (row 30)."""
    if not tensors:
        raise WeightError(f"{kind} load refused, nothing changed: no tensors")
    parameters = {name for name, _ in model.named_parameters()}
    lost = [name for name in tensors if not _known(parameters, kind, name)]
    if lost:
        raise WeightError(f"{kind} load refused, nothing changed: the engine's model has no {lost[:3]}")
    if bad := not_finite(tensors):
        raise WeightError(f"{kind} load refused, nothing changed: {bad[:3]} hold NaN or infinity")


_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED |= {"up_proj": "gate_up_proj"}


def _known(parameters: Set[str], kind: str, name: str) -> bool:
    """Whether `name` has a parameter: SGLang fuses q, k, v and gate, up, and a drafter's names lack "model."; with it,
    they would be a policy's. Its own head, where it has one, lies beside that."""
    fused = ".".join(_FUSED.get(piece, piece) for piece in name.split("."))
    return (f"model.{fused}" if kind == "drafter" and name != OWN_HEAD else fused) in parameters


def serve_parts(tensors: Mapping[str, Tensor], part_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Tensors in parts of about `part_bytes`: a part lies on the GPU beside the model while it is copied in. A version
    that fits one part is loaded whole or not at all."""
    parts: list[list[tuple[str, Tensor]]] = [[]]
    room = part_bytes
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and size > room:
            parts.append([])
            room = part_bytes
        parts[-1].append((name, tensor))
        room -= size
    return parts
