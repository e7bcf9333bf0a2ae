"""Reading a drafter that somebody published, in any of the layouts, for one target: names and numbers are brought to
this project's, and everything that would make it another function is refused by the key that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.core.errors import ConfigError, DataError, WeightError
from services.drafter.head import TargetHead, read_target_head
from services.drafter.layouts import FUSION, HF_CLASSES, TRANSFORMER, Layout
from services.models.drafter import LAYER_PREFIX, OWN_HEAD, DrafterMethod
from services.models.eagle import Eagle
from services.models.eagle3 import Eagle3, pick_aux_layers
from services.models.files import model_dir, read_config, read_tensors
from services.models.layers import ModelSpec, model_spec
from services.models.target import check_tensors
from services.models.vocabulary import D2T, T2D, draft_ids

EMBED = "embed_tokens.weight"
SGLANG_CLASSES = {
    "LlamaForCausalLMEagle": "eagle",
    "Qwen2ForCausalLMEagle": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
}
# Keys that change what the draft layer computes, and the one value that is computed here.
FIXED_KEYS = {
    "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    "layernorms": False, "mlp_bias": False, "hidden_act": "silu", "num_hidden_layers": 1,
}  # fmt: skip
CLOSE = 2**-7  # bfloat16's step: a copy of the target's embedding may have been rounded once


@dataclass(frozen=True)
class PublishedDrafter:
    """`tensors` under this project's names, as stored (dtype too)."""

    method: DrafterMethod
    tensors: Mapping[str, Tensor]
    layout: Layout

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())


@dataclass(frozen=True)
class _Kind:
    layout: Layout
    method: str  # a value of drafter.method


def read_published(folder: Path, target: Path) -> PublishedDrafter:
    """The drafter in `folder` for the model folder `target`. Reads nothing that it does not check; raises DataError or
    WeightError naming the key or tensor that does not fit, and then there is nothing."""
    if not (folder / "config.json").is_file():
        raise DataError(f"no drafter at {folder}: config.json is missing; give the folder of a drafter")
    spec = model_spec(read_config(model_dir(str(target))))
    config = read_config(folder)
    kind = _kind_of(folder, config)
    layer = config.get("transformer_layer_config", config) if kind.layout == "speculators" else config
    _check_keys(folder, config, layer, kind, spec)
    tensors = _renamed(folder, read_tensors(folder))
    _check_fused(folder, kind, tensors, spec)
    try:
        method = _method_of(folder, kind, config, tensors, spec)
        if kind.method == "eagle" and method.spec.model_type != layer.get("model_type"):
            raise DataError(
                f"{folder / 'config.json'} has model_type {layer.get('model_type')}, a draft layer for a "
                f"{spec.model_type} target is {method.spec.model_type}: use a drafter made for this target"
            )
        own = _trained(folder, tensors, method, read_target_head(model_dir(str(target)), spec, torch.device("cpu")))
        check_tensors(own, method.names(), "drafter import")
    except (ConfigError, WeightError) as error:
        raise type(error)(f"{folder}: {error}") from None
    return PublishedDrafter(method, own, kind.layout)


def _kind_of(folder: Path, config: Mapping[str, Any]) -> _Kind:
    made_by = config.get("speculators_model_type")
    if made_by is not None:
        if made_by not in ("eagle", "eagle3"):
            raise DataError(
                f"{folder / 'config.json'} has speculators_model_type {made_by!r}: only eagle and eagle3 drafters can "
                "be used here"
            )
        return _Kind("speculators", made_by)
    found = config.get("architectures") or ()
    hf = {name: SGLANG_CLASSES[sglang] for sglang, name in HF_CLASSES.items()}
    for name in found:
        if name in SGLANG_CLASSES:
            return _Kind("sglang", SGLANG_CLASSES[name])
        if name in hf:
            return _Kind("hf", hf[name])
    known = ", ".join([*SGLANG_CLASSES, *hf])
    raise DataError(
        f"{folder / 'config.json'} has architectures {config.get('architectures')}: not a drafter that is known here, "
        f"which are {known}, and speculators folders (speculators_model_type)"
    )


def _check_keys(
    folder: Path, config: Mapping[str, Any], layer: Mapping[str, Any], kind: _Kind, target: ModelSpec
) -> None:
    """The numbers that must be the target's, and the variants that are not computed here."""
    for key, found, wanted in (*_shape_keys(layer, target), *_variant_keys(config, layer, kind, target)):
        if found != wanted:
            raise DataError(
                f"{folder / 'config.json'} has {key} {found}, but a {kind.method} drafter for this target needs "
                f"{wanted}: it was made for another model or in a way that is not computed here; use the drafter of "
                "this target"
            )


def _shape_keys(layer: Mapping[str, Any], target: ModelSpec) -> Iterator[tuple[str, Any, Any]]:
    heads = layer.get("num_attention_heads")
    size = layer.get("hidden_size")
    yield "hidden_size", size, target.hidden_size
    yield "vocab_size", layer.get("vocab_size"), target.vocab_size
    yield "intermediate_size", layer.get("intermediate_size"), target.intermediate_size
    yield "num_attention_heads", heads, target.num_heads
    yield "num_key_value_heads", layer.get("num_key_value_heads") or heads, target.num_kv_heads
    yield "head_dim", layer.get("head_dim") or (size // heads if heads else None), target.head_dim
    yield "rms_norm_eps", layer.get("rms_norm_eps", 1e-6), target.norm_eps
    yield "rope_parameters", _rope(layer), dict(target.rope)


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """As model_spec reads it."""
    found = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    found.setdefault("rope_theta", layer.get("rope_theta", 10000.0))
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    return found


def _variant_keys(
    config: Mapping[str, Any], layer: Mapping[str, Any], kind: _Kind, target: ModelSpec
) -> Iterator[tuple[str, Any, Any]]:
    for key, wanted in FIXED_KEYS.items():
        yield key, config.get(key, layer.get(key, wanted)) or wanted, wanted
    if kind.method == "eagle3":
        yield "attention_bias", bool(layer.get("attention_bias", False)), False
        yield "target_hidden_size", config.get("target_hidden_size") or target.hidden_size, target.hidden_size


def _check_fused(folder: Path, kind: _Kind, tensors: Mapping[str, Tensor], target: ModelSpec) -> None:
    """EAGLE's fc takes embedding and last state, EAGLE-3's three states: config.json and tensors must agree."""
    pieces = {"eagle": 2, "eagle3": 3}
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape != (target.hidden_size, pieces[kind.method] * target.hidden_size):
        raise DataError(
            f"{folder}: config.json (architectures, speculators_model_type) says {kind.method}, but fc.weight is "
            f"{list(fc.shape)}, expected {[target.hidden_size, pieces[kind.method] * target.hidden_size]}: config.json "
            "is of another drafter; use a whole checkpoint"
        )


def _renamed(folder: Path, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {_own_name(name): tensor for name, tensor in found.items()}
    if len(tensors) < len(found):
        raise DataError(f"{folder} holds a tensor twice, under the names of two layouts: use a whole checkpoint")
    return tensors


def _own_name(name: str) -> str:
    """SpecForge calls the layer `midlayer`, speculators' EAGLE `transformer` behind `fusion_fc`."""
    plain = name.removeprefix("model.")
    for theirs, ours in (("midlayer.", LAYER_PREFIX), (TRANSFORMER, LAYER_PREFIX), (FUSION, "fc.")):
        if plain.startswith(theirs):
            return ours + plain.removeprefix(theirs)
    return plain


def _method_of(
    folder: Path, kind: _Kind, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelSpec
) -> DrafterMethod:
    if kind.method == "eagle":
        return Eagle(target)
    layers = _aux_layers(folder, kind.layout, config, target.num_layers)
    stated, head = config.get("draft_vocab_size"), tensors.get(OWN_HEAD)
    if head is None:
        if stated not in (None, target.vocab_size) or D2T in tensors:
            raise DataError(
                f"{folder} has draft_vocab_size {stated}, but no {OWN_HEAD}: a head over a part of the tokens is the "
                "drafter's own; use a whole checkpoint"
            )
        return Eagle3(target, layers)
    if stated not in (None, head.shape[0]):
        raise DataError(f"{folder} has draft_vocab_size {stated}, but {OWN_HEAD} has {head.shape[0]} rows")
    return Eagle3(target, layers, draft_ids(tensors, head.shape[0], target.vocab_size, str(folder)))


def _aux_layers(folder: Path, layout: Layout, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """As outputs of layers counted from 0. Not stated: what engines take then."""
    nested = config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    found = nested.get(key) if layout == "sglang" else config.get(key) or nested.get(key)
    if found is None:
        inputs: list[int] = [2, num_layers // 2, num_layers - 3]
        layers = [k - 1 for k in inputs]
    else:
        layers = [int(k) for k in found] if layout == "sglang" else [int(k) - 1 for k in found]
    if len(layers) != 3 or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] > num_layers - 2:
        raise DataError(
            f"{folder / 'config.json'}: {key} {found} means the outputs of layers {layers}, counted from 0; a drafter "
            f"here reads three different ones from 0 to {num_layers - 2} of this target, in rising order"
        )
    return pick_aux_layers(tuple(layers), num_layers)


def _trained(folder: Path, tensors: Mapping[str, Tensor], method: DrafterMethod, head: TargetHead) -> dict[str, Tensor]:
    """Without the copies of the target's tensors and without what is always zero, once they are known to be that."""
    own = {name: tensor for name, tensor in tensors.items() if name not in (D2T, T2D)}
    copies = {EMBED: head.embed}
    if method.draft_ids is None:
        copies[OWN_HEAD] = head.head
    for name, wanted in copies.items():
        if name in own:
            _check_copy(folder, name, own.pop(name), wanted)
    for name in method.engine_zeros().keys() & own.keys():
        if bool(own.pop(name).any()):
            raise DataError(f"{folder}: {name} is not zero, but drafters here have none: use a drafter without it")
    return own


def _check_copy(folder: Path, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape or not torch.allclose(found.float(), wanted.float(), rtol=CLOSE, atol=1e-6):
        raise DataError(
            f"{folder}: {name} is not the target's: the drafter was made for another target, or trained its own, which "
            "drafters here do not have; use the drafter of this target"
        )
