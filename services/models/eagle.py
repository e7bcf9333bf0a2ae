"""EAGLE (Li et al. 2024): one decoder layer over fc[embedding of the next token ; the target's last hidden state].

Its output is an estimate of the target's next hidden state: the LM head takes it as it is, and so does the next depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.models.drafter import LAYER_PREFIX, DrafterMethod, DraftStep, llama_config, llama_layer
from services.models.layers import Attend, LayerWeights, ModelSpec, decoder_layer, layer_weights
from services.models.target import layer_shapes

# What stock engines have: no class has Qwen3's q and k norms, so its drafter is Llama-shaped.
_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle", "qwen3": "LlamaForCausalLMEagle"}
_DROP = ("layer_types", "max_window_layers", "transformers_version")  # of the target's depth, or of its own file only


@dataclass(frozen=True)
class EagleNetwork:
    """fc [H,2H] and the layer, whose input norm is left out as in the paper's code."""

    fc: Tensor
    layer: LayerWeights
    spec: ModelSpec

    def enter(self, states: Tensor) -> Tensor:
        return states

    def step(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> DraftStep:
        fused = F.linear(torch.cat([embeds, hidden], dim=-1), self.fc)
        out = decoder_layer(fused, self.layer, self.spec, rope, attend)
        return DraftStep(hidden=out, predicted=out)


@dataclass(frozen=True)
class Eagle(DrafterMethod):
    """The layer has Qwen2's biases for a Qwen2 target and is Llama's for any other."""

    name = "eagle"
    title = "EAGLE"
    matches_features = True

    @property
    def architecture(self) -> str:
        return _ARCHITECTURES[self.target.model_type]

    @property
    def spec(self) -> ModelSpec:
        if self.target.model_type == "qwen2":
            return dataclasses.replace(self.target, num_layers=1)
        return llama_layer(self.target)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def reads(self) -> str:
        return "the target's last hidden state"

    def names(self) -> dict[str, tuple[int, ...]]:
        h = self.target.hidden_size
        layer = {LAYER_PREFIX + name: shape for name, shape in layer_shapes(self.spec).items()}
        return {"fc.weight": (h, 2 * h), **layer}

    def engine_zeros(self) -> dict[str, tuple[int, ...]]:
        return {"fc.bias": (self.target.hidden_size,)}

    def network(self, tensors: Mapping[str, Tensor]) -> EagleNetwork:
        spec = self.spec
        return EagleNetwork(tensors["fc.weight"], layer_weights(tensors, LAYER_PREFIX, spec, input_norm=False), spec)

    def folder_config(self, target_config: Mapping[str, Any]) -> dict[str, Any]:
        if self.target.model_type != "qwen2":
            return llama_config(self.spec, target_config) | {"architectures": [self.architecture]}
        kept = {key: value for key, value in target_config.items() if key not in _DROP}
        return kept | {"architectures": [self.architecture], "num_hidden_layers": 1, "tie_word_embeddings": False}
