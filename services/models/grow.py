"""A larger model that computes the same function: extra layers and extra width that add nothing.

A small trained model gives real acceptance lengths, response lengths and rewards, but its speed says nothing about a
large one. Grown to a large shape it costs what the large shape costs while every logit stays what it was.

Why the logits stay, with h -> H the hidden sizes and s = sqrt(h / H):

- The residual stream is padded with zeros. RMSNorm then divides by sqrt(sum(x^2) / H + eps'); with eps' = eps h / H
  this is s sqrt(sum(x^2) / h + eps), so norm weights times s give the old result, exactly.
- Qwen3 norms each q and k head with the same eps, over an unchanged head size: q and k projections times s make their
  mean squares smaller by h / H as well, and the norm gives the old heads back.
- A new head is not read (its o_proj columns are zero), nor a new MLP unit (its down_proj columns); a new layer writes
  nothing (all of o_proj and down_proj is zero). New layers follow the old ones, so layer ids keep their meaning.
- Query heads share key/value heads in runs of num_heads / num_kv_heads. Old key/value heads keep their places, and
  each one's query heads go to the front of its run.

All of this is exact in real numbers. In bfloat16 it is exact where s is a power of two (H = 4 h, 16 h, ...); otherwise
the scaled weights are rounded once more. Under training the padding stays zero, for what is padded neither reads nor
writes and Adam leaves a weight alone whose gradient was always zero; only query heads added to an old key/value head
(a larger num_heads / num_kv_heads) see something and begin to learn. Adam's steps weigh more on the scaled weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

import torch
from torch import Tensor

from services.core.errors import ConfigError, DataError
from services.models.layers import ModelSpec

NOISE_STD = 0.02
NOISE_LENGTH = 1_048_573  # prime, so that rows of a tiled matrix differ


class Axis(Enum):
    """What the entries along one dimension of a weight belong to. HIDDEN may hold several hidden states side by side
    (the drafters' fc and EAGLE-3's q, k, v): each is padded by itself."""

    VOCAB = auto()
    HIDDEN = auto()
    INNER = auto()
    QUERY = auto()
    KEY_VALUE = auto()
    WITHIN_HEAD = auto()


# By the last two parts of a tensor's name, for targets and drafters alike.
_AXES: dict[str, tuple[Axis, ...]] = {
    "embed_tokens.weight": (Axis.VOCAB, Axis.HIDDEN),
    "lm_head.weight": (Axis.VOCAB, Axis.HIDDEN),
    "norm.weight": (Axis.HIDDEN,),
    "input_layernorm.weight": (Axis.HIDDEN,),
    "post_attention_layernorm.weight": (Axis.HIDDEN,),
    "hidden_norm.weight": (Axis.HIDDEN,),
    "q_proj.weight": (Axis.QUERY, Axis.HIDDEN),
    "k_proj.weight": (Axis.KEY_VALUE, Axis.HIDDEN),
    "v_proj.weight": (Axis.KEY_VALUE, Axis.HIDDEN),
    "q_proj.bias": (Axis.QUERY,),
    "k_proj.bias": (Axis.KEY_VALUE,),
    "v_proj.bias": (Axis.KEY_VALUE,),
    "q_norm.weight": (Axis.WITHIN_HEAD,),
    "k_norm.weight": (Axis.WITHIN_HEAD,),
    "o_proj.weight": (Axis.HIDDEN, Axis.QUERY),
    "o_proj.bias": (Axis.HIDDEN,),
    "gate_proj.weight": (Axis.INNER, Axis.HIDDEN),
    "up_proj.weight": (Axis.INNER, Axis.HIDDEN),
    "down_proj.weight": (Axis.HIDDEN, Axis.INNER),
    "fc.weight": (Axis.HIDDEN, Axis.HIDDEN),
    "fc.bias": (Axis.HIDDEN,),
}
_NORMS = ("norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "hidden_norm.weight")
_NORMED_HEADS = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
# They read zeros through their new columns, and nothing reads their new rows: both may hold anything.
_FREE = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")


@dataclass(frozen=True)
class GrownShape:
    """What `longtail grow` asks for; vocabulary and head size stay the source's."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class Place:
    """Along one axis: the grown `size`, and where each old entry goes [old size]."""

    size: int
    index: Tensor


@dataclass(frozen=True)
class Growth:
    """From `source` to `shape`. With `noise`, weights that cannot reach a logit hold small random numbers instead of
    zeros: a GPU under its power limit multiplies zeros faster than it would real weights. Training would then use
    them, so noise is for measuring speed only."""

    source: ModelSpec
    shape: GrownShape
    noise: bool = False

    def __post_init__(self) -> None:
        problems = list(_problems(self.source, self.shape))
        if problems:
            raise ConfigError("cannot grow: " + "; ".join(problems))

    @property
    def scale(self) -> float:
        """s above."""
        return math.sqrt(self.source.hidden_size / self.shape.hidden_size)

    @property
    def spec(self) -> ModelSpec:
        """Numbers of the grown model."""
        eps = self.source.norm_eps * self.source.hidden_size / self.shape.hidden_size
        return dataclasses.replace(self.source, norm_eps=eps, **dataclasses.asdict(self.shape))

    def place(self, axis: Axis, size: int) -> Place | None:
        """Where `size` old entries go; None when a model of the source's shape has no such axis."""
        s, grown = self.source, self.shape
        if axis is Axis.HIDDEN:
            blocks, rest = divmod(size, s.hidden_size)
            starts = torch.arange(blocks) * grown.hidden_size
            return None if rest else Place(blocks * grown.hidden_size, _runs(starts, s.hidden_size))
        if axis is Axis.QUERY:
            heads = torch.arange(s.num_heads)
            run, grown_run = s.num_heads // s.num_kv_heads, grown.num_heads // grown.num_kv_heads
            heads = heads // run * grown_run + heads % run
            place = Place(grown.num_heads * s.head_dim, _runs(heads * s.head_dim, s.head_dim))
        elif axis is Axis.KEY_VALUE:
            place = Place(grown.num_kv_heads * s.head_dim, torch.arange(s.num_kv_heads * s.head_dim))
        elif axis is Axis.INNER:
            place = Place(grown.intermediate_size, torch.arange(s.intermediate_size))
        else:
            return Place(size, torch.arange(size))
        return place if len(place.index) == size else None


def _runs(starts: Tensor, length: int) -> Tensor:
    """[n] -> [n * length]: the indices of runs."""
    return (starts[:, None] + torch.arange(length)).flatten()


def _problems(source: ModelSpec, shape: GrownShape) -> Iterator[str]:
    for field in dataclasses.fields(shape):
        asked, had = getattr(shape, field.name), getattr(source, field.name)
        if asked < had:
            yield f"{field.name} {asked} is below the source's {had}, and growing only adds: give at least {had}"
    heads, kv = shape.num_heads, shape.num_kv_heads
    if kv < 1 or heads % kv:
        yield f"num_heads {heads} is no multiple of num_kv_heads {kv}: change one of them"
        return
    if source.model_type == "llama" and shape.hidden_size % heads:
        yield f"hidden_size {shape.hidden_size} of a Llama must be a multiple of num_heads {heads}: change one of them"
    run = source.num_heads // source.num_kv_heads
    if heads // kv < run:
        yield (
            f"each key/value head of the source serves {run} query heads, of the grown model {heads // kv}: "
            f"give num_heads of at least {run * kv}, or num_kv_heads of at most {heads // run}"
        )


def _kind(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _places(name: str, shape: tuple[int, ...], growth: Growth) -> list[Place]:
    axes = _AXES.get(_kind(name))
    if axes is None or len(axes) != len(shape):
        raise DataError(
            f"tensor {name} {shape} belongs to no Llama, Qwen2 or Qwen3 model and no EAGLE or EAGLE-3 drafter: "
            "only these can be grown"
        )
    places = [growth.place(axis, size) for axis, size in zip(axes, shape, strict=True)]
    found = [p for p in places if p is not None]
    if len(found) != len(places):
        raise DataError(f"tensor {name} is {shape}, which does not fit the config.json beside it")
    return found


def grown_size(name: str, shape: tuple[int, ...], growth: Growth) -> tuple[int, ...]:
    """What `grow_tensor` makes of a weight of this name and shape. Raises DataError for a name or a size that a model
    of the source's shape does not have."""
    return tuple(p.size for p in _places(name, shape, growth))


def grow_tensor(name: str, tensor: Tensor, growth: Growth) -> Tensor:
    """One weight of a target or drafter at its grown size, in its own dtype. Raises DataError as `grown_size`."""
    kind, places = _kind(name), _places(name, tuple(tensor.shape), growth)
    factor = growth.scale if kind in _NORMS or (growth.source.qk_norm and kind in _NORMED_HEADS) else 1.0
    out = _blank(tuple(p.size for p in places), tensor.dtype, growth.noise and kind in _FREE)
    rows, columns = places[0].index, [p.index for p in places[1:]]
    out[(rows[:, None] if columns else rows, *columns)] = tensor * factor
    return out


def new_layer_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, growth: Growth) -> Tensor:
    """One weight of a layer that the source does not have: norms at one, so that it does the work of a layer."""
    kind = _kind(name)
    if kind in _NORMS or _AXES[kind] == (Axis.WITHIN_HEAD,):
        return torch.ones(shape, dtype=dtype)
    return _blank(shape, dtype, growth.noise and kind in _FREE)


def _blank(shape: tuple[int, ...], dtype: torch.dtype, noise: bool) -> Tensor:
    if not noise:
        return torch.zeros(shape, dtype=dtype)
    count = math.prod(shape)
    return _noise(dtype).repeat(-(-count // NOISE_LENGTH))[:count].reshape(shape)


@lru_cache(maxsize=2)
def _noise(dtype: torch.dtype) -> Tensor:
    """The same numbers for every weight: drawing billions anew would take minutes."""
    return (torch.randn(NOISE_LENGTH, generator=torch.Generator().manual_seed(0)) * NOISE_STD).to(dtype)
