"""A drafter as engines and libraries store it: config.json and tensors of each layout, from one method's tensors.

    sglang        LlamaForCausalLMEagle, Qwen2ForCausalLMEagle, LlamaForCausalLMEagle3, also how SpecForge stores them
    speculators   the speculators library's: `eagle3` as of version 0.9, which vLLM serves; `eagle` as up to 0.3
    hf            bare names under the classes of vLLM's model registry

The same numbers mean different things: SGLang's aux layer id k is the output of layer k, counted from 0; in the other
two it is the input of layer k, the output of the one before. vLLM takes a missing `norm_before_residual` for true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from services.core.errors import WeightError
from services.models.drafter import LAYER_PREFIX, DrafterMethod
from services.models.target import check_tensors
from services.models.vocabulary import D2T, T2D

Layout = Literal["sglang", "speculators", "hf"]
LAYOUTS: tuple[Layout, ...] = ("sglang", "speculators", "hf")

EAGLE3_VERSION, EAGLE_VERSION = "0.9.0", "0.3.0"  # of speculators
FUSION, TRANSFORMER = "fusion_fc.", "transformer."
HF_CLASSES = {
    "LlamaForCausalLMEagle": "EagleLlamaForCausalLM",
    "Qwen2ForCausalLMEagle": "EagleQwen2ForCausalLM",
    "LlamaForCausalLMEagle3": "Eagle3LlamaForCausalLM",
}
# What EAGLE-3 variants compute differently: none of it here, and said in so many words.
NO_VARIANT = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


@dataclass(frozen=True)
class DrafterFiles:
    """config.json as a mapping, and the tensors of model.safetensors."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Verifier:
    """The target as a drafter's folder names it: its config.json, a name or path that engines can load, and how many
    tokens to draft a round."""

    config: Mapping[str, Any]
    name: str
    depth: int = 3


def in_layout(layout: Layout, tensors: Mapping[str, Tensor], method: DrafterMethod, verifier: Verifier) -> DrafterFiles:
    """Raises WeightError for anything but exactly the drafter's tensors."""
    check_tensors(tensors, method.names(), "drafter export")
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if not own:
        raise WeightError("drafter export refused: there are no tensors")
    match layout:
        case "sglang":
            constants = method.folder_constants(own["fc.weight"].dtype)
            return DrafterFiles(method.folder_config(verifier.config), own | constants)
        case "speculators":
            return _speculators(own, method, verifier)
    return _hf(own, method, verifier)


def _speculators(own: dict[str, Tensor], method: DrafterMethod, verifier: Verifier) -> DrafterFiles:
    layer = _layer_config(method, verifier)
    common: dict[str, Any] = {
        "speculators_model_type": method.name,
        "speculators_config": _speculators_config(method, verifier),
        "transformer_layer_config": layer,
    }
    if method.name == "eagle":
        renamed = {_speculators_name(name): tensor for name, tensor in own.items()}
        return DrafterFiles(common | _eagle_fields(method), renamed)
    return DrafterFiles(common | _eagle3_fields(method), own | _mapping(method, own))


def _eagle_fields(method: DrafterMethod) -> dict[str, Any]:
    decoder = "Qwen2DecoderLayer" if method.spec.model_type == "qwen2" else "LlamaDecoderLayer"
    return {
        "architectures": ["EagleSpeculator"],
        "speculators_version": EAGLE_VERSION,
        "transformer_layer_architecture": decoder,
        "layernorms": False,
        "fusion_bias": False,
    }


def _eagle3_fields(method: DrafterMethod) -> dict[str, Any]:
    target, ids = method.target, method.draft_ids
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_version": EAGLE3_VERSION,
        "draft_vocab_size": target.vocab_size if ids is None else len(ids),
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": _as_inputs(method),
        "embed_requires_grad": False,
        **NO_VARIANT,
    }


def _speculators_config(method: DrafterMethod, verifier: Verifier) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": verifier.depth}
    return {
        "algorithm": method.name,
        "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.config.get("architectures") or ())},
    }


def _speculators_name(name: str) -> str:
    if name.startswith("fc."):
        return FUSION + name.removeprefix("fc.")
    assert name.startswith(LAYER_PREFIX), name
    return TRANSFORMER + name.removeprefix(LAYER_PREFIX)


def _hf(own: dict[str, Tensor], method: DrafterMethod, verifier: Verifier) -> DrafterFiles:
    config = _layer_config(method, verifier) | {"architectures": [HF_CLASSES[method.architecture]]}
    if method.name == "eagle":
        return DrafterFiles(config, own)
    config |= {
        "draft_vocab_size": None if method.draft_ids is None else len(method.draft_ids),
        "target_hidden_size": method.target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": _as_inputs(method),
        **NO_VARIANT,
    }
    return DrafterFiles(config, own | _mapping(method, own))


def _layer_config(method: DrafterMethod, verifier: Verifier) -> dict[str, Any]:
    """The draft layer alone; also with the rotary base where libraries before transformers 5 look for it."""
    config = method.folder_config(verifier.config)
    ours = ("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config")
    kept = {key: value for key, value in config.items() if key not in ours}
    return kept | {"rope_theta": method.spec.rope["rope_theta"]}


def _as_inputs(method: DrafterMethod) -> list[int]:
    return [layer + 1 for layer in method.aux_layers]


def _mapping(method: DrafterMethod, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """d2t and t2d of a head over some of the tokens; libraries expect none for the whole vocabulary."""
    ids = method.draft_ids
    if ids is None or len(ids) == method.target.vocab_size:
        return {}
    return {name: t for name, t in method.folder_constants(own["fc.weight"].dtype).items() if name in (D2T, T2D)}
