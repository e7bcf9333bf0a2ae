"""Small GGUF files, written as llama.cpp's converter lays them out: from a transformers model and a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))
MERGES = (("Ċ", "Ċ"), ("a", "b"), ("Ġ", "a"))
WORDS = (*SPECIALS, *LETTERS, *("".join(pair) for pair in MERGES))
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    splitter: str = "smollm",
    extra: Sequence[tuple[str, np.ndarray]] = (),
    **changes: Any,
) -> Path:
    """`changes`: values of `tokenizer.ggml.*` or other string keys, None to leave one out."""
    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(file, arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if arch == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
    _add_tokenizer(writer, splitter, changes)
    for name, values in (*_tensors(model), *extra):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, splitter: str, changes: dict[str, Any]) -> None:
    writer.add_tokenizer_model(changes.get("kind", "gpt2"))
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(WORDS) - len(SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(changes.get("add_bos", False))
    writer.add_chat_template(TEMPLATE)
    if "eot" in changes:
        writer.add_eot_token_id(changes["eot"])
    if "scaling" in changes:
        writer.add_rope_scaling_type(changes["scaling"])


def _tensors(model: PreTrainedModel) -> list[tuple[str, np.ndarray]]:
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        for part, count in heads.items():
            if part in name and config.model_type == "llama":  # other order of each head's halves
                split = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
                values = split.swapaxes(1, 2).reshape(values.shape)
        base, _, suffix = name.rpartition(".")
        found.append((f"{names.get_name(base)}.{suffix}", np.ascontiguousarray(values)))
    return found
