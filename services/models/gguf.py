"""What a GGUF file says about its model, and its tokenizer as one of the `tokenizers` library.

transformers reads the weights of a GGUF file well, but the tokenizer it makes of one differs from the original's: the
name of the splitter (`tokenizer.ggml.pre`) is passed over, so that "\\n\\n42" comes out as other tokens than the model
was trained on, and a Llama's end of sequence becomes its beginning. So the tokenizer is built here, from the file's own
vocabulary and merges. Sources: the GGUF specification (key names, token types); llama.cpp's splitters by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from gguf import GGUFReader
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from services.core.errors import DataError

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
ROPE_FACTORS = "rope_freqs.weight"  # a tensor: how Llama 3.1 and later scale their positions
# Qwen2's pieces, but numbers in threes
_LLAMA3_REGEX = PRETOKENIZE_REGEX.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True)
class GgufVocabulary:
    """`kind` and `splitter` are `tokenizer.ggml.model` and `tokenizer.ggml.pre`; `eos` holds the end of sequence, then
    the end of a turn where that is another token. Ids are None where the file names none."""

    kind: str
    splitter: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    unk: int | None
    add_bos: bool
    chat_template: str | None

    def word(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]


@dataclass(frozen=True)
class GgufFacts:
    """`scaled_rope`: positions are scaled, in a way that transformers does not read from the file. `head_dim`: where
    the file names it."""

    architecture: str
    scaled_rope: bool
    head_dim: int | None
    vocabulary: GgufVocabulary


def read_gguf(file: Path) -> GgufFacts:
    """The file's metadata; tensors stay on the disk. Raises DataError for anything but a whole GGUF file of a model
    with its tokenizer."""
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{file} is no GGUF file, or damaged: {error}") from error

    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        return default if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture is None or value("tokenizer.ggml.tokens") is None:
        raise DataError(f"{file} holds no language model with a tokenizer: take a model's GGUF file")
    scaling = value(f"{architecture}.rope.scaling.type", "none")
    factors = any(tensor.name == ROPE_FACTORS for tensor in reader.tensors)
    head_dim = value(f"{architecture}.attention.key_length")
    return GgufFacts(architecture, factors or scaling != "none", head_dim, _vocabulary(value))


def _vocabulary(value: Callable[..., Any]) -> GgufVocabulary:
    def token_id(name: str) -> int | None:
        found = value(f"tokenizer.ggml.{name}_token_id")
        return None if found is None else int(found)

    tokens = tuple(value("tokenizer.ggml.tokens"))
    ends = (token_id("eos"), token_id("eot"))
    return GgufVocabulary(
        kind=value("tokenizer.ggml.model", ""),
        splitter=value("tokenizer.ggml.pre", "default"),
        tokens=tokens,
        token_types=tuple(value("tokenizer.ggml.token_type", [1] * len(tokens))),
        merges=tuple(_pair(merge) for merge in value("tokenizer.ggml.merges", ())),
        bos=token_id("bos"),
        eos=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad=token_id("padding"),
        unk=token_id("unknown"),
        add_bos=bool(value("tokenizer.ggml.add_bos_token", False)),
        chat_template=value("tokenizer.chat_template"),
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def gguf_tokenizer(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer that the file describes. Raises DataError for another kind, or a splitter that is
    not known here: a guess would cut texts into other tokens than those the model was trained on."""
    if vocabulary.kind != "gpt2" or vocabulary.splitter not in _SPLITTERS:
        raise DataError(
            f"the file's tokenizer is of kind {vocabulary.kind!r} with splitter {vocabulary.splitter!r}, and known is "
            f"'gpt2' with {', '.join(sorted(_SPLITTERS))}: name a folder that has the original tokenizer.json by "
            "--tokenizer"
        )
    words = {token: index for index, token in enumerate(vocabulary.tokens)}
    llama3 = vocabulary.splitter == "llama-bpe"
    core = tokenizers.Tokenizer(models.BPE(words, list(vocabulary.merges), ignore_merges=llama3))
    core.pre_tokenizer = _SPLITTERS[vocabulary.splitter]()
    core.decoder = decoders.ByteLevel()
    if vocabulary.splitter == "qwen2":
        core.normalizer = normalizers.NFC()
    marked = list(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    core.add_special_tokens([_added(token, special=True) for token, kind in marked if kind == CONTROL])
    core.add_tokens([_added(token, special=False) for token, kind in marked if kind == USER_DEFINED])
    bos = vocabulary.word(vocabulary.bos)
    if vocabulary.add_bos and bos is not None:
        core.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary.bos)])
    return core


def _added(token: str, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, normalized=False, special=special)


def _bytes(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _digit_by_digit() -> pre_tokenizers.PreTokenizer:
    """Digits first: what is left of a line break before a number is then whole, and becomes one token."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes()])


def _by_regex(regex: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated")
    return pre_tokenizers.Sequence([split, _bytes(use_regex=False)])


_SPLITTERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _bytes,
    "smollm": _digit_by_digit,
    "qwen2": lambda: _by_regex(PRETOKENIZE_REGEX),
    "llama-bpe": lambda: _by_regex(_LLAMA3_REGEX),
}
