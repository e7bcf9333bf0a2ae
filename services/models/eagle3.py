"""EAGLE-3 (Li et al. 2025): one decoder layer that attends over [norm(embedding) ; norm(hidden)], where hidden is fc of
three target layers' outputs at depth 0 and the drafter's own output later.

As SGLang's LlamaForCausalLMEagle3 computes it: the residual stream is the un-normed hidden, the layer's output before
the final norm goes to the next depth, behind it to the LM head. Drafters made here share the target's embedding and LM
head over its whole vocabulary (draft_vocab_size null). Published ones have a head of their own over some of the tokens:
it is trained on, and the mapping of its rows to the target's tokens stays for good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.core.errors import ConfigError
from services.models.drafter import LAYER_PREFIX, OWN_HEAD, DrafterMethod, DraftStep, llama_config, llama_layer
from services.models.layers import Attend, LayerWeights, ModelSpec, attend_and_mix, layer_weights, rms_norm
from services.models.target import layer_shapes
from services.models.vocabulary import mapping_tensors

NUM_AUX = 3  # SGLang sizes the drafter's buffers for three
SHALLOW = 12  # below this many layers EAGLE-3's own third choice, n - 4, would not be a high layer


def pick_aux_layers(chosen: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The three target layers whose outputs an EAGLE-3 drafter reads; id k is the output of layer k, counted from 0.

    Nothing `chosen`: a low, a middle and a high one. Deep targets get the published choice, the inputs of layers 2, n/2
    and n - 3 (outputs 1, n/2 - 1, n - 4), shallow ones the first, the middle and the last that an engine can capture:
    SGLang takes a state on entry to the layer above, so the last layer's own output is out of reach.
    Raises ConfigError for a target of fewer than four layers or a choice outside it.
    """
    last = num_layers - 2
    if last < NUM_AUX - 1:
        raise ConfigError(
            f"drafter.method: eagle3 reads {NUM_AUX} layers below the target's last one, but the target has "
            f"{num_layers} layers: set drafter.method: eagle, or take a target of at least {NUM_AUX + 1} layers"
        )
    if chosen and max(chosen) > last:
        raise ConfigError(
            f"drafter.aux_layers {list(chosen)} do not fit a target of {num_layers} layers: "
            f"choose ids from 0 to {last}, or leave them out"
        )
    if chosen:
        return chosen
    return (0, last // 2, last) if num_layers < SHALLOW else (1, num_layers // 2 - 1, num_layers - 4)


@dataclass(frozen=True)
class Eagle3Network:
    """fc [H,3H], the layer with q, k, v [.,2H], and the three norms [H] around it."""

    fc: Tensor
    embed_norm: Tensor
    hidden_norm: Tensor
    layer: LayerWeights
    norm: Tensor
    spec: ModelSpec

    def enter(self, states: Tensor) -> Tensor:
        return F.linear(states, self.fc)

    def step(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> DraftStep:
        both = torch.cat([self._normed(embeds, self.embed_norm), self._normed(hidden, self.hidden_norm)], dim=-1)
        out = attend_and_mix(both, hidden, self.layer, self.spec, rope, attend)
        return DraftStep(hidden=out, predicted=self._normed(out, self.norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (self.spec.hidden_size,), weight, self.spec.norm_eps)


@dataclass(frozen=True)
class Eagle3(DrafterMethod):
    """The layer is Llama's whatever the target is: the one class engines have knows no biases and no q and k norms.
    `layers`: the target layers read, from `pick_aux_layers`."""

    layers: tuple[int, ...]
    draft_ids: tuple[int, ...] | None = None

    name = "eagle3"
    title = "EAGLE-3"
    matches_features = False

    @property
    def architecture(self) -> str:
        return "LlamaForCausalLMEagle3"

    @property
    def spec(self) -> ModelSpec:
        return llama_layer(self.target)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.layers

    @property
    def reads(self) -> str:
        return f"the outputs of the target's layers {', '.join(map(str, self.layers))}"

    def names(self) -> dict[str, tuple[int, ...]]:
        h, spec = self.target.hidden_size, self.spec
        layer = layer_shapes(spec) | {
            f"self_attn.{x}_proj.weight": (size, 2 * h) for x, size in zip("qkv", spec.qkv_sizes, strict=True)
        }
        layer |= {"input_layernorm.weight": (h,), "hidden_norm.weight": (h,)}
        own = {"fc.weight": (h, self.state_size), "norm.weight": (h,)}
        if self.draft_ids is not None:
            own[OWN_HEAD] = (len(self.draft_ids), h)
        return own | {LAYER_PREFIX + name: shape for name, shape in layer.items()}

    def engine_zeros(self) -> dict[str, tuple[int, ...]]:
        return {}

    def folder_constants(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {} if self.draft_ids is None else mapping_tensors(self.draft_ids, self.target.vocab_size)

    def network(self, tensors: Mapping[str, Tensor]) -> Eagle3Network:
        spec = self.spec
        return Eagle3Network(
            fc=tensors["fc.weight"],
            embed_norm=tensors[f"{LAYER_PREFIX}input_layernorm.weight"],
            hidden_norm=tensors[f"{LAYER_PREFIX}hidden_norm.weight"],
            layer=layer_weights(tensors, LAYER_PREFIX, spec, input_norm=False),
            norm=tensors["norm.weight"],
            spec=spec,
        )

    def folder_config(self, target_config: Mapping[str, Any]) -> dict[str, Any]:
        return llama_config(self.spec, target_config) | {
            "architectures": [self.architecture],
            "target_hidden_size": self.target.hidden_size,
            "draft_vocab_size": None if self.draft_ids is None else len(self.draft_ids),
            "eagle_config": self._eagle_config(),
        }

    def _eagle_config(self) -> dict[str, Any]:
        return {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(self.layers)}

    def config_problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        yield from super().config_problems(config)
        found = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if found != list(self.layers):
            yield (
                f"reads target layers {found}, but this run gives it {list(self.layers)}: set drafter.aux_layers to "
                "those it was trained on, or use another drafter"
            )
