"""The decoder layer shared by the engine's target, the engine's drafter and drafter training: pure functions.

Llama, Qwen2 (biases on q, k, v) and Qwen3 (RMS norms on q and k heads) differ only in which weights are present.
Shapes: B rows, Q query positions per row, N heads, M key/value heads, D head size, H hidden size, L key positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.core.errors import DataError
from services.models.rope import check_rope, inverse_frequencies

# (q [B,Q,N,D], kv [B,Q,2,M,D]) -> attention output [B,Q,N,D]; the caller owns the key/value store and the mask.
Attend = Callable[[Tensor, Tensor], Tensor]

SUPPORTED = ("llama", "qwen2", "qwen3")
QWEN3_HEAD_DIM = 128  # of a config.json that names none, as in transformers
# One core, float32, 8 to 64 tokens: 0.02 to 0.9 million weights gain 10 to 75 % by `decoding_layout`, more lose.
CACHED_ELEMENTS = 2**20


@dataclass(frozen=True)
class ModelSpec:
    """Numbers of a decoder-only model, read from a Hugging Face config.json."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: Mapping[str, Any]
    max_positions: int

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config.json; DataError names what is not supported."""
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise DataError(f"model_type {kind!r} is not supported by the native engine: use one of {', '.join(SUPPORTED)}")
    if config.get("hidden_act", "silu") != "silu" or config.get("mlp_bias") or config.get("use_sliding_window"):
        raise DataError(f"{kind} with another activation than silu, mlp_bias or a sliding window is not supported")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise DataError(
            f"{kind} with layer_types {sorted(set(config['layer_types']))} is not supported: full_attention is"
        )
    rope = _rope_parameters(config)
    check_rope(rope)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return ModelSpec(
        model_type=str(kind),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or (QWEN3_HEAD_DIM if kind == "qwen3" else hidden // heads)),
        vocab_size=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        qk_norm=kind == "qwen3",
        rope=rope,
        max_positions=int(config.get("max_position_embeddings", 2048)),
    )


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes rope_parameters; earlier files have rope_theta and rope_scaling."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    return found


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer with q, k, v and gate, up fused, so that a decode step launches fewer kernels."""

    input_norm: Tensor | None  # None in a drafter: EAGLE has none there, EAGLE-3 norms the two halves of its input
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [N+M,D]: one weight row per query and key head, so that one norm serves both
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def layer_weights(tensors: Mapping[str, Tensor], prefix: str, spec: ModelSpec, input_norm: bool) -> LayerWeights:
    """Fuse one layer's tensors (Hugging Face names under `prefix`). Differentiable: the trainer calls it too."""

    def get(name: str) -> Tensor:
        return tensors[prefix + name]

    attn = "self_attn."
    bias = torch.cat([get(f"{attn}{x}_proj.bias") for x in "qkv"]) if spec.qkv_bias else None
    return LayerWeights(
        input_norm=get("input_layernorm.weight") if input_norm else None,
        qkv=torch.cat([get(f"{attn}{x}_proj.weight") for x in "qkv"]),
        qkv_bias=bias,
        qk_norm=_per_head(get(attn + "q_norm.weight"), get(attn + "k_norm.weight"), spec) if spec.qk_norm else None,
        out=get(attn + "o_proj.weight"),
        out_bias=tensors.get(prefix + attn + "o_proj.bias"),
        post_norm=get("post_attention_layernorm.weight"),
        gate_up=torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]),
        down=get("mlp.down_proj.weight"),
    )


def decoding_layout(weight: Tensor) -> Tensor:
    """The same matrix [out,in], laid out for few tokens at a time: column by column on a CPU, where a product of some
    dozens of tokens then takes a third to two thirds of the time. Not one that is larger than a core's cache."""
    if weight.is_cuda or weight.numel() > CACHED_ELEMENTS:
        return weight
    return weight.t().contiguous().t()


def layer_for_decoding(w: LayerWeights) -> LayerWeights:
    qkv, out, gate_up, down = map(decoding_layout, (w.qkv, w.out, w.gate_up, w.down))
    return replace(w, qkv=qkv, out=out, gate_up=gate_up, down=down)


def copy_into(own: Any, new: Any) -> None:
    """The numbers of `new` in the tensors of `own`, a record or tuple of the same structure: captured CUDA graphs hold
    their addresses."""
    if isinstance(own, Tensor):
        own.copy_(new)
    elif isinstance(own, tuple):
        for a, b in zip(own, new, strict=True):
            copy_into(a, b)
    elif is_dataclass(own):
        for field in fields(own):
            copy_into(getattr(own, field.name), getattr(new, field.name))


def _per_head(q_norm: Tensor, k_norm: Tensor, spec: ModelSpec) -> Tensor:
    return torch.cat([q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)])


class RopeTable:
    """cos and sin for positions 0..length-1, each [length, 1, D], in the layout rotate-half expects."""

    def __init__(self, spec: ModelSpec, length: int, device: torch.device, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(spec.rope, spec.head_dim))
        both = torch.cat([angles, angles], dim=-1)[:, None, :]
        self.cos, self.sin = both.cos().to(device, dtype), both.sin().to(device, dtype)
        # rotate-half is roll by D/2 with the first half negated: fold the sign into sin.
        self.sin[..., : spec.head_dim // 2] *= -1

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B,Q] -> cos, signed sin, each [B,Q,1,D]."""
        return self.cos[positions], self.sin[positions]


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B,Q,heads,D]; `sin` carries the sign of rotate-half."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rms_norm(x: Tensor, size: tuple[int], weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension. torch's own is a chain of small kernels on the CPU, where a decode
    step of a small model is bound by their number: two thirds of them do."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, size, weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    normed = x * torch.addcmul(_on_cpu(eps), length, length, value=1 / size[0]).rsqrt_()
    return normed if weight is None else normed * weight


@lru_cache(maxsize=8)
def _on_cpu(value: float) -> Tensor:
    return torch.tensor(value)


def decoder_layer(x: Tensor, w: LayerWeights, spec: ModelSpec, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
    """One pre-norm decoder layer. x [B,Q,H] -> [B,Q,H]; `attend` stores keys/values and applies the mask."""
    h = x if w.input_norm is None else rms_norm(x, (x.shape[-1],), w.input_norm, spec.norm_eps)
    return attend_and_mix(h, x, w, spec, rope, attend)


def attend_and_mix(
    h: Tensor, x: Tensor, w: LayerWeights, spec: ModelSpec, rope: tuple[Tensor, Tensor], attend: Attend
) -> Tensor:
    """The layer behind its input norm: attention reads h [B,Q,.], its result and the MLP's are added to the residual
    stream x [B,Q,H]."""
    q, kv = project_qkv(h, w, spec, rope)
    mixed = attend(q, kv).flatten(-2)
    x = x + F.linear(mixed, w.out, w.out_bias)
    gate, up = F.linear(rms_norm(x, (x.shape[-1],), w.post_norm, spec.norm_eps), w.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w.down)


def project_qkv(h: Tensor, w: LayerWeights, spec: ModelSpec, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """h [B,Q,H] (2H in EAGLE-3) -> q [B,Q,N,D] and kv [B,Q,2,M,D], normed (Qwen3) and rotated."""
    n, m, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    heads = F.linear(h, w.qkv, w.qkv_bias).unflatten(-1, (n + 2 * m, d))
    qk = heads[..., : n + m, :]
    if w.qk_norm is not None:
        qk = rms_norm(qk, (d,), None, spec.norm_eps) * w.qk_norm
    qk = rotate(qk, *rope)
    return qk[..., :n, :], torch.stack([qk[..., n:, :], heads[..., n + m :, :]], dim=-3)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [B,Q,N,D], k and v [B,L,M,D], additive mask broadcastable to [B,N,Q,L] (None: causal) -> [B,Q,N,D]."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
