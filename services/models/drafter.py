"""What a drafter method is, and the trainable drafter around one.

A method says which tensors a drafter version has, which target states it reads and how one draft depth is computed; the
engine, the trainer and the export ask it, so that nothing else tells EAGLE from EAGLE-3. No method stores the target's
embedding or LM head: a drafter push can therefore not overwrite the target's tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.models.layers import Attend, ModelSpec, at_least_float32

LAYER_PREFIX = "layers.0."
OWN_HEAD = "lm_head.weight"


def llama_layer(target: ModelSpec) -> ModelSpec:
    """One Llama layer of the target's width: the shape of draft layer that engines have whatever the target is."""
    return replace(target, model_type="llama", num_layers=1, qkv_bias=False, qk_norm=False)


def llama_config(spec: ModelSpec, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Llama-shaped drafter, without its architecture: of a Qwen target's, only what both families mean
    alike may be copied."""
    alike = ("dtype", "torch_dtype", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
    return {key: target_config[key] for key in alike if key in target_config} | {
        "model_type": spec.model_type,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": dict(spec.rope),
        "max_position_embeddings": spec.max_positions,
        "vocab_size": spec.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


class DraftStep(NamedTuple):
    """One draft depth, both [B,Q,H]: `hidden` is what the next depth is fed with, `predicted` what the target's LM head
    takes (an estimate of the target's last hidden state one position later)."""

    hidden: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class DraftHead:
    """The LM head that a draft is drawn with: weight [D,H]. Row d is token `ids[d]` (int64 [D], rising) of the target's
    vocabulary; None: the target's own head, where row v is token v."""

    weight: Tensor
    ids: Tensor | None = None

    def logits(self, predicted: Tensor) -> Tensor:
        """[...,H] -> [...,D] in float32, or float64 where the weights are."""
        return at_least_float32(F.linear(predicted, self.weight))


class DraftNetwork(Protocol):
    """The weights of one drafter version in the engine's fused form. Differentiable."""

    def enter(self, states: Tensor) -> Tensor:
        """Target states [B,Q,S] -> what `step` takes as `hidden` [B,Q,H]; the drafter's own output skips this."""

    def step(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> DraftStep:
        """embeds [B,Q,H] of the tokens one position later than `hidden` [B,Q,H]."""


@dataclass(frozen=True)
class DrafterMethod(ABC):
    """One method for one target. `name` is its value of `drafter.method`; `matches_features`: training also pulls
    `predicted` towards the target's hidden state, beside the cross-entropy."""

    target: ModelSpec

    name: ClassVar[str]
    title: ClassVar[str]
    matches_features: ClassVar[bool]

    @property
    @abstractmethod
    def architecture(self) -> str:
        """The class of the drafter in an engine's model registry."""

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """Numbers of the drafter's own layer."""

    @property
    @abstractmethod
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads, rising; empty: the last hidden state."""

    @property
    @abstractmethod
    def reads(self) -> str:
        """The target states in words."""

    @property
    def draft_ids(self) -> tuple[int, ...] | None:
        """Target token of each row of a head of the drafter's own, rising; None: it drafts with the target's head."""
        return None

    @property
    def state_size(self) -> int:
        """S, the width of the target states of one token."""
        return self.target.hidden_size * max(1, len(self.aux_layers))

    @abstractmethod
    def names(self) -> dict[str, tuple[int, ...]]:
        """Trainable tensors and shapes: exactly what a drafter version consists of (names as SGLang loads them)."""

    @abstractmethod
    def engine_zeros(self) -> dict[str, tuple[int, ...]]:
        """Tensors that SGLang's class has besides, always zero here. A file or load without them leaves random ones."""

    def folder_constants(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What an exported file holds beside the trainable tensors."""
        return {name: torch.zeros(shape, dtype=dtype) for name, shape in self.engine_zeros().items()}

    @abstractmethod
    def network(self, tensors: Mapping[str, Tensor]) -> DraftNetwork:
        """Fuse a version's tensors; the caller has checked names and shapes (`check_tensors`)."""

    @abstractmethod
    def folder_config(self, target_config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of an exported drafter, from the target's."""

    def config_problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        """What keeps a drafter folder's config.json from being this method's for this target, with the remedy."""
        found = config.get("architectures")
        if self.architecture not in (found or ()):
            yield (
                f"has architectures {found}, but drafter.method: {self.name} and a {self.target.model_type} target "
                f"needs ['{self.architecture}']: set drafter.method to the one this drafter was made for, or use a "
                "drafter made for this target"
            )
        for key, have in (("hidden_size", self.target.hidden_size), ("vocab_size", self.target.vocab_size)):
            if config.get(key) != have:
                yield f"has {key} {config.get(key)}, the target has {have}: use the drafter made for this target"
        found, own = config.get("draft_vocab_size"), None if self.draft_ids is None else len(self.draft_ids)
        if found != own:
            yield (
                f"has draft_vocab_size {found}, but this run's drafter has {own or 'the LM head of the target'}: the "
                "rows of a head of its own mean other tokens; name its folder in drafter.path, or use a drafter that "
                "shares the target's head (draft_vocab_size null)"
            )


class Drafter(nn.Module):
    """Trainable drafter; `tensors()` has the names and shapes of its method."""

    def __init__(self, method: DrafterMethod) -> None:
        super().__init__()
        self.method = method
        self._names = tuple(method.names())
        for name, shape in method.names().items():
            self.register_parameter(self._key(name), nn.Parameter(torch.zeros(shape)))
        ids = method.draft_ids
        self.register_buffer("draft_ids", None if ids is None else torch.tensor(ids), persistent=False)

    @staticmethod
    def _key(name: str) -> str:
        return name.replace(".", "__")  # nn.Module forbids dots in parameter names

    def tensors(self) -> dict[str, Tensor]:
        """Name -> parameter (live, differentiable)."""
        return {name: getattr(self, self._key(name)) for name in self._names}

    def reset(self, generator: torch.Generator) -> None:
        """Random start: normal with std 0.02, norms at one, and `fc` passing the (highest) hidden state through, which
        is its last H columns in every method."""
        h = self.method.target.hidden_size
        with torch.no_grad():
            for name, p in self.tensors().items():
                if p.dim() == 1:
                    p.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    p.normal_(0.0, 0.02, generator=generator)
            fc = self.get_parameter(self._key("fc.weight"))
            fc[:, -h:] += torch.eye(h, device=fc.device)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors in; the caller has checked names and shapes (`check_tensors`)."""
        with torch.no_grad():
            for name, p in self.tensors().items():
                p.copy_(tensors[name])

    def network(self) -> DraftNetwork:
        return self.method.network(self.tensors())

    def head(self, target_head: Tensor) -> DraftHead:
        """Its own, which learns, else the target's [V,H], which gets no gradient."""
        if self.method.draft_ids is None:
            return DraftHead(target_head.detach())
        return DraftHead(self.tensors()[OWN_HEAD], self.get_buffer("draft_ids"))
