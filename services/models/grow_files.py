"""Grow model folders on disk, shard by shard: the memory needed is that of one shard, whatever the grown size."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.core.errors import ConfigError, DataError
from services.models.device import pick_dtype
from services.models.files import GROWN_FILE, model_dir, read_config
from services.models.grow import GrownShape, Growth, grow_tensor, grown_size, new_layer_tensor
from services.models.layers import ModelSpec, model_spec
from services.models.target import target_names

SHARD_BYTES = 2**30
_TOKENIZER_FILES = (
    "tokenizer*", "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template*",
)  # fmt: skip
_NOTE = (
    "Computes what its source computes: extra layers write nothing, extra width is zero. Acceptance lengths, response "
    "lengths and rewards are the source's; speed and memory are those of the grown shape with the source's vocabulary. "
    "Say so beside every figure measured with it."
)


@dataclass(frozen=True)
class GrowOptions:
    """`dtype`: "float32", "bfloat16", or None for the source's. `noise`: see `Growth`. `positions`: the grown model's
    max_position_embeddings, None for the source's; the source has learnt nothing about those beyond its own."""

    shape: GrownShape
    dtype: str | None = None
    noise: bool = False
    positions: int | None = None


@dataclass(frozen=True)
class Grown:
    """What was written: `files` safetensors files of `parameters` numbers in all."""

    folder: str
    source_parameters: int
    parameters: int
    num_bytes: int
    files: int


def grow_target(source: Path, folder: Path, options: GrowOptions) -> Grown:
    """Write `source`, a model folder, at its grown shape to `folder`, with tokenizer files and `grown.json`.

    Raises ConfigError for an impossible shape or a `folder` that holds a model, DataError for a source that is not a
    whole Llama, Qwen2 or Qwen3 model. config.json comes last: a folder left half-written is no model folder.
    """
    source = model_dir(str(source))
    config = read_config(source)
    config = with_positions(config, options.positions)
    growth = Growth(model_spec(config), options.shape, options.noise)
    refuse_occupied(folder)
    with _Source(source) as tensors:
        own, shapes = target_names(growth.source), target_names(growth.spec)
        _check_whole(source, tensors, own)

        def make(name: str) -> Tensor:
            if name in own:
                return grow_tensor(name, tensors.get(name), growth)
            return new_layer_tensor(name, shapes[name], tensors.dtype, growth)

        grown = _write_weights(folder, shapes, make, options.dtype, tensors)
    copy_tokenizer(source, folder)
    _write_json(folder / GROWN_FILE, _record(source, growth, grown))
    _write_json(folder / "config.json", grown_config(config, growth, options.dtype))
    return grown


def grow_drafter(source: Path, folder: Path, target: Path, options: GrowOptions) -> Grown:
    """Write the drafter folder `source` (EAGLE or EAGLE-3) of the model folder `target`, as it was before growing, to
    `folder`: beside the grown target it drafts what it drafted. EAGLE-3 goes on reading the layers it was trained on.

    Raises as `grow_target`, and DataError for a drafter of another target.
    """
    config, of = with_positions(read_config(source), options.positions), model_spec(read_config(model_dir(str(target))))
    growth = Growth(_drafter_spec(source, config, of), options.shape, options.noise)
    refuse_occupied(folder)
    with _Source(source) as tensors:
        shapes = {name: grown_size(name, tensors.shape(name), growth) for name in sorted(tensors.names)}
        grown = _write_weights(
            folder, shapes, lambda name: grow_tensor(name, tensors.get(name), growth), options.dtype, tensors
        )
    _write_json(folder / GROWN_FILE, _record(source, growth, grown))
    _write_json(folder / "config.json", _drafter_config(config, growth, options.dtype))
    return grown


def with_positions(config: Mapping[str, Any], positions: int | None) -> Mapping[str, Any]:
    """A model's config.json with so many positions. Raises ConfigError for fewer than it has. No kind of rotary
    positions that `model_spec` lets in depends on their number."""
    if positions is None:
        return config
    had = model_spec(config).max_positions
    if positions < had:
        raise ConfigError(f"--max-positions {positions} is below the source's {had}: raise it, or leave it out")
    return {**config, "max_position_embeddings": positions}


def _drafter_spec(folder: Path, config: Mapping[str, Any], target: ModelSpec) -> ModelSpec:
    """The drafter's numbers, once they are known to be the target's."""
    if config.get("draft_vocab_size") is not None:
        raise DataError(f"{folder} has an LM head of its own (draft_vocab_size): grow one that shares its target's")
    spec = model_spec(config)
    for key in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        if getattr(spec, key) != getattr(target, key):
            raise DataError(
                f"{folder} has {key} {getattr(spec, key)}, the target {getattr(target, key)}: "
                "give the drafter that was made for this target"
            )
    return spec


def _check_whole(folder: Path, tensors: _Source, wanted: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [name for name, shape in wanted.items() if name not in tensors.names or tensors.shape(name) != shape]
    if wrong:
        raise DataError(
            f"{folder}: {len(wrong)} of {len(wanted)} tensors that its config.json asks for are missing or of another "
            f"size, such as {wrong[0]}: give a whole checkpoint"
        )


def refuse_occupied(folder: Path) -> None:
    """ConfigError for a folder that already holds weights."""
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds a model or a part of one: name another folder, or remove it first")


class _Source:
    """The safetensors files of a folder, opened together; tensors are read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> _Source:
        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise DataError(f"no *.safetensors in {self._folder}: convert the checkpoint to safetensors first")
        with ExitStack() as opening:
            for file in files:
                try:
                    opened = opening.enter_context(safe_open(file, framework="pt"))
                except SafetensorError as error:
                    raise DataError(f"{file} is damaged or truncated: {error}") from error
                self._file_of |= dict.fromkeys(opened.keys(), opened)
            self._stack = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor: new layers follow it."""
        return self.get(min(self._file_of)).dtype

    def get(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())


def _write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    make: Callable[[str], Tensor],
    dtype_word: str | None,
    source: _Source,
) -> Grown:
    folder.mkdir(parents=True, exist_ok=True)
    dtype = pick_dtype(dtype_word) if dtype_word else source.dtype
    shards = list(_shards(shapes, SHARD_BYTES // dtype.itemsize))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: make(name).to(dtype) for name in names}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    parameters = sum(map(math.prod, shapes.values()))
    num_bytes = parameters * dtype.itemsize
    if len(shards) > 1:
        listing = {"metadata": {"total_size": num_bytes}, "weight_map": index}
        _write_json(folder / "model.safetensors.index.json", listing)
    had = sum(math.prod(source.shape(name)) for name in source.names & shapes.keys())
    return Grown(str(folder), had, parameters, num_bytes, len(shards))


def _shards(shapes: Mapping[str, tuple[int, ...]], most: int) -> Iterator[list[str]]:
    """Names in order, in runs of at most `most` numbers (at least one tensor each)."""
    names: list[str] = []
    held = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        if names and held + count > most:
            yield names
            names, held = [], 0
        names.append(name)
        held += count
    yield names


def _numbers(spec: ModelSpec) -> dict[str, Any]:
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
    }


def grown_config(config: Mapping[str, Any], growth: Growth, dtype: str | None = None) -> dict[str, Any]:
    """config.json of the grown target, from the source's."""
    layers = growth.shape.num_layers
    grown = dict(config) | _numbers(growth.spec) | {"num_hidden_layers": layers}
    if "layer_types" in grown:
        grown["layer_types"] = ["full_attention"] * layers  # the only kind that `model_spec` lets in
    return _with_dtype(grown, dtype)


def _drafter_config(config: Mapping[str, Any], growth: Growth, dtype: str | None) -> dict[str, Any]:
    grown = dict(config) | _numbers(growth.spec)
    if "target_hidden_size" in grown:
        grown["target_hidden_size"] = growth.shape.hidden_size
    return _with_dtype(grown, dtype)


def _with_dtype(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    if dtype is not None:
        config.pop("torch_dtype", None)  # the older key of the same meaning
        config["dtype"] = dtype
    return config


def _record(source: Path, growth: Growth, grown: Grown) -> dict[str, Any]:
    return {
        "grown_from": str(source),
        "source_shape": _numbers(growth.source) | {"num_hidden_layers": growth.source.num_layers},
        "source_parameters": grown.source_parameters,
        "parameters": grown.parameters,
        "new_weights": "noise" if growth.noise else "zeros",
        "bfloat16_exact": math.frexp(growth.scale)[0] == 0.5,
        "note": _NOTE,
    }


def copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy2(file, folder / file.name)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)
