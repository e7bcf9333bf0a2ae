"""A model folder that a run can take, from a GGUF file or from a Hugging Face folder that lacks something: weights as
safetensors in one number format, config.json without a word of quantisation, tokenizer.json."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from services.core.errors import ConfigError, DataError
from services.models.device import pick_dtype
from services.models.files import read_config
from services.models.gguf import GgufFacts, GgufVocabulary, gguf_tokenizer, read_gguf
from services.models.layers import SUPPORTED, ModelSpec, model_spec
from services.models.target import check_tensors, target_names

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class ConvertedModel:
    """What was written; `eos_token_ids` end a response."""

    folder: str
    model_type: str
    parameters: int
    dtype: str
    tied: bool
    eos_token_ids: tuple[int, ...]
    chat_template: bool


def convert_model(source: Path, out: Path, dtype: str = "float32", tokenizer: Path | None = None) -> ConvertedModel:
    """Write folder `out`, whole or not at all. `source`: a GGUF file or a model folder; `tokenizer`: a folder whose
    tokenizer to take instead of the source's.

    Raises DataError for what cannot be read, is not supported, or would come out incomplete; ConfigError when `out` is
    there already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} holds something already: name another folder, or remove it first")
    disable_progress_bar()
    facts = None if source.is_dir() else _checked(source, tokenizer)
    model = _load(source, dtype, facts)
    spec = model_spec(model.config.to_dict())
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as place:
        folder = Path(place) / "model"
        model.save_pretrained(folder)
        _write_tokenizer(tokenizer or source, folder, None if facts is None or tokenizer else facts.vocabulary)
        result = _described(out, folder, spec, sum(p.numel() for p in model.parameters()), dtype)
        folder.rename(out)
    return result


def _checked(file: Path, tokenizer: Path | None) -> GgufFacts:
    """The file's facts, known to lead to a model that computes what the original does."""
    facts = read_gguf(file)
    if facts.architecture not in SUPPORTED:
        raise DataError(f"{file} is a {facts.architecture!r} model: one of {', '.join(SUPPORTED)} is supported")
    if facts.scaled_rope:
        raise DataError(
            f"{file} scales its positions (rope), which transformers does not read from GGUF: the model would be wrong "
            "at every position; take the original safetensors folder"
        )
    if tokenizer is None:
        gguf_tokenizer(facts.vocabulary)  # before minutes go into the weights
    return facts


def _load(source: Path, dtype: str, facts: GgufFacts | None) -> PreTrainedModel:
    place: dict[str, Any] = {"pretrained_model_name_or_path": source}
    if facts is not None:
        place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        if facts.head_dim is not None and facts.architecture != "qwen2":  # which has no such setting
            place["head_dim"] = facts.head_dim  # transformers would take its default for a Qwen3
    elif "quantization_config" in read_config(source):
        raise DataError(f"{source} holds quantised weights: take the original, unquantised folder")
    model, told = AutoModelForCausalLM.from_pretrained(
        **place, dtype=pick_dtype(dtype), local_files_only=True, output_loading_info=True
    )
    if told["missing_keys"] or told["mismatched_keys"]:  # transformers would leave random weights there
        raise DataError(f"{source} lacks weights of the model: {sorted(map(str, told['missing_keys']))[:3]}")
    model.config.__dict__.pop("quantization_config", None)
    spec = model_spec(model.config.to_dict())
    check_tensors(_published(model, spec), target_names(spec), "conversion")
    if facts is not None:
        _set_special_ids(model, facts.vocabulary)
    found: PreTrainedModel = model
    return found


def _published(model: PreTrainedModel, spec: ModelSpec) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if not (spec.tied and k == "lm_head.weight")}


def _set_special_ids(model: PreTrainedModel, vocabulary: GgufVocabulary) -> None:
    ids = {"bos_token_id": vocabulary.bos, "pad_token_id": vocabulary.pad, "eos_token_id": _one_or_list(vocabulary.eos)}
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else list(ids) or None


def _write_tokenizer(source: Path, folder: Path, vocabulary: GgufVocabulary | None) -> None:
    if vocabulary is not None:
        ids = {"bos": vocabulary.bos, "pad": vocabulary.pad, "unk": vocabulary.unk}
        ids["eos"] = vocabulary.eos[0] if vocabulary.eos else None
        words = {f"{name}_token": vocabulary.word(i) for name, i in ids.items() if i is not None}
        made = PreTrainedTokenizerFast(tokenizer_object=gguf_tokenizer(vocabulary), **words)
        made.chat_template = vocabulary.chat_template
        made.save_pretrained(folder)
    elif (source / "tokenizer.json").is_file():  # byte for byte: reading and writing could change it
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, folder / name)
    else:
        _rebuilt_tokenizer(source).save_pretrained(folder)


def _rebuilt_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """From an older folder's vocabulary files."""
    try:
        made: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(source, local_files_only=True, use_fast=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{source} has no tokenizer that can be read ({error}): name one by --tokenizer") from error
    return made


def _described(out: Path, folder: Path, spec: ModelSpec, parameters: int, dtype: str) -> ConvertedModel:
    if not (folder / "tokenizer.json").is_file():
        raise DataError("no tokenizer.json came out: name a folder that has one by --tokenizer")
    generation = folder / "generation_config.json"
    eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.is_file() else None
    eos = read_config(folder).get("eos_token_id") if eos is None else eos
    template = (folder / "chat_template.jinja").is_file()
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    return ConvertedModel(str(out), spec.model_type, parameters, dtype, spec.tied, ids, template)
