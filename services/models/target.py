"""The target for the engine: a Llama / Qwen2 / Qwen3 forward over a key/value store, from Hugging Face weights.

The policy trainer uses transformers' own classes on the same weights, so the two are checked against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.core.errors import WeightError
from services.models.finite import not_finite
from services.models.kv import KVStore, PackedKV
from services.models.layers import (
    LayerWeights,
    ModelSpec,
    RopeTable,
    at_least_float32,
    copy_into,
    decoder_layer,
    decoding_layout,
    layer_for_decoding,
    layer_weights,
    rms_norm,
)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetWeights:
    embed: Tensor  # [V,H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H]
    head: Tensor  # [V,H], when tied the embedding's numbers


def target_names(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor a policy version must bring, with its shape."""
    h = spec.hidden_size
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, h), "model.norm.weight": (h,)}
    if not spec.tied:
        names["lm_head.weight"] = (spec.vocab_size, h)
    for n in range(spec.num_layers):
        names[f"model.layers.{n}.input_layernorm.weight"] = (h,)
        names |= {f"model.layers.{n}.{name}": shape for name, shape in layer_shapes(spec).items()}
    return names


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensors of one decoder layer (without its input norm) by name under the layer's prefix."""
    h, i = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (h,)}
    for x, size in zip("qkv", spec.qkv_sizes, strict=True):
        shapes[f"self_attn.{x}_proj.weight"] = (size, h)
        if spec.qkv_bias:
            shapes[f"self_attn.{x}_proj.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (h, spec.qkv_sizes[0])
    if spec.qkv_bias and spec.model_type != "qwen2":  # attention_bias of the others covers the output projection too
        shapes["self_attn.o_proj.bias"] = (h,)
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    return shapes | {"mlp.gate_proj.weight": (i, h), "mlp.up_proj.weight": (i, h), "mlp.down_proj.weight": (h, i)}


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    """All-or-nothing gate of every weight load: the names and shapes must match exactly and be finite."""
    check_shapes(tensors, expected, what)
    if bad := not_finite(tensors):
        raise WeightError(f"{what} load refused, nothing changed: {bad[0]} holds NaN or infinity")


def check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    """The part of `check_tensors` that does not read the numbers."""
    check_names({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected, what)


def check_names(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    """`check_shapes` of weights that are known by name and shape only."""
    missing, extra = expected.keys() - shapes.keys(), shapes.keys() - expected.keys()
    if missing or extra:
        raise WeightError(
            f"{what} load refused, nothing changed: {len(expected) - len(missing)} of {len(expected)} tensors match; "
            f"missing {sorted(missing)[:3]}, not wanted {sorted(extra)[:3]}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise WeightError(f"{what} load refused, nothing changed: {name} is {shapes[name]}, expected {shape}")


class TargetModel:
    """Weights of one policy version plus the forward pass. No gradients."""

    def __init__(self, spec: ModelSpec, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.device, self.dtype = spec, device, dtype
        self.rope = RopeTable(spec, max_len, device, dtype)
        self._weights: TargetWeights | None = None

    @property
    def weights(self) -> TargetWeights:
        assert self._weights is not None, "load a policy version first"
        return self._weights

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Adopt Hugging Face tensors, all or nothing. A tied model may come with or without lm_head.weight."""
        given = {k: v for k, v in tensors.items() if not (self.spec.tied and k == "lm_head.weight")}
        check_tensors(given, target_names(self.spec), "policy")
        # clone: in one process the trainer goes on writing into the tensors it published
        moved = {k: v.detach().to(self.device, self.dtype, copy=True) for k, v in given.items()}
        embed = moved["model.embed_tokens.weight"]
        fresh = TargetWeights(
            embed=embed,
            layers=tuple(
                layer_for_decoding(layer_weights(moved, f"model.layers.{n}.", self.spec, input_norm=True))
                for n in range(self.spec.num_layers)
            ),
            norm=moved["model.norm.weight"],
            head=decoding_layout(embed if self.spec.tied else moved["lm_head.weight"]),
        )
        if self._weights is None:
            self._weights = fresh
        else:
            copy_into(self._weights, fresh)

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        kv: KVStore | PackedKV,
        write_at: Tensor,
        mask: Tensor,
        first_row: int = 0,
    ) -> Tensor:
        """ids, positions, write_at [B,Q] for B rows of `kv`; mask additive [B,1,Q,L] -> last hidden [B,Q,H]. Packed:
        [1,N] of them -> [1,N,H].

        Keys and values of each query go to column `write_at` of its row; the mask covers columns 0..L-1.
        """
        w = self.weights
        rope = self.rope.at(positions)
        x = F.embedding(ids, w.embed)
        for n, layer in enumerate(w.layers):
            x = decoder_layer(x, layer, self.spec, rope, kv.attend(n, write_at, mask, first_row))
        return rms_norm(x, (self.spec.hidden_size,), w.norm, self.spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> logits [...,V] in float32, or float64 where the weights are."""
        return at_least_float32(F.linear(hidden, self.weights.head))
