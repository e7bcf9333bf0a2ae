"""The EAGLE drafter network (Li et al. 2024): one decoder layer over [embedding of the next token ; hidden state].

It owns `fc` and one layer only. Embedding and LM head are the target's, passed in, never stored: a drafter push can
therefore not overwrite the target's tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from services.models.layers import Attend, LayerWeights, ModelSpec, decoder_layer, layer_weights
from services.models.target import layer_shapes

LAYER_PREFIX = "layers.0."
ARCHITECTURES = {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle", "qwen3": "Qwen3ForCausalLMEagle"}


def drafter_spec(target: ModelSpec) -> ModelSpec:
    """The target's shape with one layer."""
    return dataclasses.replace(target, num_layers=1)


def drafter_names(target: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Trainable tensors and shapes: exactly what a drafter version consists of (names as SGLang loads them)."""
    names: dict[str, tuple[int, ...]] = {"fc.weight": (target.hidden_size, 2 * target.hidden_size)}
    return names | {LAYER_PREFIX + name: shape for name, shape in layer_shapes(target).items()}


def fuse_drafter(tensors: Mapping[str, Tensor], target: ModelSpec) -> LayerWeights:
    """The layer of a drafter version in the engine's fused form; `fc.weight` is used as it is."""
    return layer_weights(tensors, LAYER_PREFIX, drafter_spec(target), input_norm=False)


def draft_forward(
    fc: Tensor,
    layer: LayerWeights,
    spec: ModelSpec,
    embeds: Tensor,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    attend: Attend,
) -> Tensor:
    """embeds, hidden [B,Q,H] -> predicted hidden state of the next position [B,Q,H] (feed it to the LM head)."""
    fused = nn.functional.linear(torch.cat([embeds, hidden], dim=-1), fc)
    return decoder_layer(fused, layer, spec, rope, attend)


class EagleDrafter(nn.Module):
    """Trainable drafter; `tensors()` has the names and shapes of `drafter_names`."""

    def __init__(self, target: ModelSpec) -> None:
        super().__init__()
        self.target_spec = target
        self.spec = drafter_spec(target)
        self._names = tuple(drafter_names(target))
        for name, shape in drafter_names(target).items():
            self.register_parameter(self._key(name), nn.Parameter(torch.zeros(shape)))

    @staticmethod
    def _key(name: str) -> str:
        return name.replace(".", "__")  # nn.Module forbids dots in parameter names

    def tensors(self) -> dict[str, Tensor]:
        """Name -> parameter (live, differentiable)."""
        return {name: getattr(self, self._key(name)) for name in self._names}

    def reset(self, generator: torch.Generator) -> None:
        """Random start: normal with std 0.02, norms at one, and `fc` passing the hidden state through."""
        h = self.spec.hidden_size
        with torch.no_grad():
            for name, p in self.tensors().items():
                if p.dim() == 1:
                    p.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    p.normal_(0.0, 0.02, generator=generator)
            self.get_parameter(self._key("fc.weight"))[:, h:] += torch.eye(h)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors in; the caller has checked names and shapes (`check_tensors`)."""
        with torch.no_grad():
            for name, p in self.tensors().items():
                p.copy_(tensors[name])

    def layer(self) -> LayerWeights:
        return fuse_drafter(self.tensors(), self.target_spec)

    def fc(self) -> Tensor:
        return self.get_parameter(self._key("fc.weight"))
