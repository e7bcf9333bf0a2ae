"""Text to token ids and back. Training uses ids only; text is for people and verifiers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from tokenizers import decoders, models, pre_tokenizers

from services.core.errors import DataError, RequestError
from services.models.files import model_dir, read_config

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PAD, BOS, EOS, UNK = range(4)
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")


def _bytes_by_character() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a printable character (GPT-2); bytes that are none come after 255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_OF = _bytes_by_character()


class Tokenizer:
    """A model folder's tokenizer.json with its end-of-sequence ids."""

    def __init__(self, core: tokenizers.Tokenizer, folder: Path, eos_token_ids: tuple[int, ...]) -> None:
        self._core = core
        self._folder = folder
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self.vocab_size = core.get_vocab_size()
        decoder = json.loads(core.to_str())["decoder"]
        self._byte_level = "ByteLevel" in json.dumps(decoder)
        self._chat: Any = None  # transformers' tokenizer, once a chat template is asked for

    @property
    def unk_token_id(self) -> int | None:
        """What characters outside the vocabulary become; None for vocabularies that can spell everything."""
        unk = getattr(self._core.model, "unk_token", None)
        return None if unk is None else self._core.token_to_id(unk)

    def encode(self, text: str) -> list[int]:
        return list(self._core.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all `ids` at once, special tokens left out: characters split over tokens come out whole."""
        return str(self._core.decode(list(ids), skip_special_tokens=True))

    def settled(self, ids: Sequence[int]) -> str:
        """The part of `decode(ids)` that no further token can change. Left out: a character whose bytes are not all
        there; and byte tokens at the end, since a run of them is decoded as a whole."""
        end = len(ids)
        while end and self._fallback_byte(ids[end - 1]) is not None:
            end -= 1
        return self.decode(ids[:end]).rstrip("\ufffd")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for: it may be a part of a character only."""
        token = self._core.id_to_token(token_id) or ""
        byte = self._fallback_byte(token_id)
        if byte is not None:
            return bytes([byte])
        if self._byte_level and all(c in BYTE_OF for c in token):
            return bytes(BYTE_OF[c] for c in token)
        return str(self._core.decode([token_id], skip_special_tokens=False)).encode()

    def _fallback_byte(self, token_id: int) -> int | None:
        match = _BYTE_TOKEN.fullmatch(self._core.id_to_token(token_id) or "")
        return int(match[1], 16) if match else None

    def render_messages(self, messages: Sequence[Mapping[str, str]], template: str | None = None) -> list[int]:
        """Prompt ids of a conversation, by the model's chat template or a given one. Raises DataError without any, and
        RequestError when the template refuses the messages."""
        if not (template or self.has_chat_template):
            raise DataError(f"{self._folder} has no chat template: give one, or ask for plain completions")
        try:
            text = self._chat_tokenizer.apply_chat_template(
                [dict(m) for m in messages], chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from None
        return self.encode(text)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_tokenizer.chat_template is not None

    def render(self, prompt_text: str, chat_template: bool) -> list[int]:
        """Prompt ids exactly as rollout feeds them: begin-of-sequence + text, or the model's chat template."""
        if chat_template:
            return self._render_chat(prompt_text)
        return list(self._core.encode(prompt_text, add_special_tokens=True).ids)

    def _render_chat(self, prompt_text: str) -> list[int]:
        if not self.has_chat_template:
            raise DataError(f"{self._folder} has no chat template: set data.chat_template to false")
        return self.render_messages([{"role": "user", "content": prompt_text}])

    @property
    def _chat_tokenizer(self) -> Any:
        if self._chat is None:
            from transformers import AutoTokenizer  # heavy import, needed for chat templates only

            self._chat = AutoTokenizer.from_pretrained(self._folder)
        return self._chat


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a model folder ("pocket" for the shipped one)."""
    folder = model_dir(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{file} is missing: save the model's fast tokenizer beside its weights")
    return Tokenizer(tokenizers.Tokenizer.from_file(str(file)), folder, _eos_ids(folder))


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in transformers; either may hold one id or a list."""
    generation = folder / "generation_config.json"
    sources: list[dict[str, Any]] = [read_config(folder)]
    if generation.is_file():
        sources.insert(0, json.loads(generation.read_text(encoding="utf-8")))
    for source in sources:
        found = source.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    raise DataError(f"{folder}: neither generation_config.json nor config.json names eos_token_id")


def character_tokenizer(characters: str) -> tokenizers.Tokenizer:
    """One token per character of `characters`, specials first (pad 0, bos 1, eos 2, unk 3); bos opens a prompt."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *characters))}
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=SPECIALS[UNK]))
    core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{SPECIALS[BOS]} $A", special_tokens=[(SPECIALS[BOS], BOS)]
    )
    core.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIALS])
    return core
