from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from services.core.errors import DataError
from services.models.tokenizer import Tokenizer, character_tokenizer, load_tokenizer


def byte_tokenizer(*merges: str) -> tokenizers.Tokenizer:
    """Byte-level BPE: token id = byte rank, so that every non-ASCII character is several tokens; plus given merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(letters)} | {m: 256 + i for i, m in enumerate(merges)}
    core = tokenizers.Tokenizer(models.BPE(vocab, [(m[0], m[1:]) for m in merges]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<eos>"])
    return core


def save(folder: Path, core: tokenizers.Tokenizer, config: dict, generation: dict | None = None) -> str:
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save(tmp_path_factory.mktemp("bytes"), byte_tokenizer(), {"eos_token_id": 256}))


TEXT = "A 世界 😀 naïve é"


def test_row_22_text_is_the_decoding_of_all_ids(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(TEXT)
    assert len(ids) == len(TEXT.encode()) > len(TEXT)  # characters are split over tokens
    assert byte_level.decode(ids) == TEXT
    pieces = "".join(byte_level.decode([i]) for i in ids)
    assert "�" in pieces and pieces != TEXT  # what decoding token by token would have shown


@given(st.text(max_size=30))
def test_row_22_any_text_comes_back_whole(text: str) -> None:
    core = byte_tokenizer()
    tokenizer = Tokenizer(core, Path(), (256,))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_row_53_two_id_sequences_may_have_one_text(tmp_path: Path) -> None:
    """Why training uses ids: encode(decode(ids)) need not be ids."""
    tokenizer = load_tokenizer(save(tmp_path, byte_tokenizer("ab"), {"eos_token_id": 257}))
    merged, split = tokenizer.encode("ab"), tokenizer.encode("a") + tokenizer.encode("b")
    assert merged != split and tokenizer.decode(merged) == tokenizer.decode(split) == "ab"


def test_special_tokens_are_not_part_of_the_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode([*byte_level.encode("ok"), 256]) == "ok"
    assert byte_level.vocab_size == 257


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 6]}, None, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 5]}, (7, 5)),
        ({"eos_token_id": 5}, {"temperature": 1.0}, (5,)),
        ({"eos_token_id": 0}, None, (0,)),
        ({}, {"eos_token_id": 9}, (9,)),
    ],
)
def test_end_of_sequence_ids(tmp_path: Path, config: dict, generation: dict | None, expected: tuple) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_tokenizer(), config, generation))
    assert tokenizer.eos_token_ids == expected and tokenizer.eos_token_id == expected[0]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="eos_token_id"):
        load_tokenizer(save(tmp_path / "a", byte_tokenizer(), {}))
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is missing"):
        load_tokenizer(str(folder))
    with pytest.raises(DataError, match=r"config\.json is missing"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_character_tokenizer(tmp_path: Path) -> None:
    core = character_tokenizer("0123456789+-=# \n")
    tokenizer = load_tokenizer(save(tmp_path, core, {"eos_token_id": 2}))
    text = "12 + 7 - 35=\n#-16"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.render(text, chat_template=False) == [1, *ids]
    assert tokenizer.encode("é") == [3]


def test_a_chat_template_is_rendered_with_the_generation_prompt(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_tokenizer(), {"eos_token_id": 256, "model_type": "qwen3"})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    with pytest.raises(DataError, match="no chat template"):
        tokenizer.render("hi", chat_template=True)
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}>{% endif %}"
    file.write_text(json.dumps(settings | {"chat_template": template}))
    assert tokenizer.decode(load_tokenizer(folder).render("hi", chat_template=True)) == "[user]hi>"
