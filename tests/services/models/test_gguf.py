from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import DataError
from services.models.gguf import GgufVocabulary, gguf_tokenizer, read_gguf
from tests.services.models.gguf_files import MERGES, SPECIALS, WORDS, write_gguf
from tests.services.models.tiny import tiny_model


def vocabulary(splitter: str = "smollm", kind: str = "gpt2", add_bos: bool = False) -> GgufVocabulary:
    types = (3,) * len(SPECIALS) + (1,) * (len(WORDS) - len(SPECIALS))
    return GgufVocabulary(kind, splitter, WORDS, types, MERGES, 1, (2,), 2, 0, add_bos, None)


def pieces(splitter: str, text: str) -> list[str]:
    return list(gguf_tokenizer(vocabulary(splitter)).encode(text).tokens)


def test_line_breaks_before_a_number_stay_one_token() -> None:
    """With the byte-level pieces alone the second line break would go with the number."""
    assert pieces("smollm", "\n\n42") == ["ĊĊ", "4", "2"]
    assert pieces("gpt-2", "\n\n42") == ["Ċ", "Ċ", "4", "2"]
    assert pieces("qwen2", "\n\n42") == ["ĊĊ", "4", "2"]


def test_numbers_are_cut_as_the_splitter_says() -> None:
    def split(splitter: str) -> list[str]:
        core = gguf_tokenizer(vocabulary(splitter))
        return [text for text, _ in core.pre_tokenizer.pre_tokenize_str("12345")]

    assert split("smollm") == split("qwen2") == list("12345")
    assert split("llama-bpe") == ["123", "45"] and split("gpt-2") == ["12345"]


@pytest.mark.parametrize("splitter", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
@given(text=st.text(max_size=20))
def test_any_text_comes_back(splitter: str, text: str) -> None:
    core = gguf_tokenizer(vocabulary(splitter))
    whole = core.normalizer.normalize_str(text) if splitter == "qwen2" else text
    ids = core.encode(text).ids
    assert core.decode(ids, skip_special_tokens=False) == whole
    if not any(word in text for word in SPECIALS):
        assert not set(ids) & {0, 1, 2}


def test_special_tokens_are_whole_and_no_part_of_the_text() -> None:
    core = gguf_tokenizer(vocabulary())
    ids = core.encode("<|im_start|>ab<|im_end|>").ids
    assert ids == [1, WORDS.index("ab"), 2] and core.decode(ids) == "ab"


def test_a_beginning_of_sequence_is_put_where_the_file_asks_for_it() -> None:
    assert gguf_tokenizer(vocabulary(add_bos=True)).encode("ab").ids == [1, WORDS.index("ab")]
    assert gguf_tokenizer(vocabulary()).encode("ab").ids == [WORDS.index("ab")]


@pytest.mark.parametrize(("splitter", "kind"), [("deepseek", "gpt2"), ("smollm", "llama"), ("default", "gpt2")])
def test_a_tokenizer_that_would_be_a_guess_is_refused(splitter: str, kind: str) -> None:
    with pytest.raises(DataError, match="--tokenizer"):
        gguf_tokenizer(vocabulary(splitter, kind))


def test_the_facts_of_a_file(tmp_path: Path) -> None:
    model = tiny_model("llama", len(WORDS))
    facts = read_gguf(write_gguf(tmp_path / "a.gguf", model, eot=1))
    assert (facts.architecture, facts.scaled_rope) == ("llama", False)
    found = facts.vocabulary
    assert (found.tokens, found.merges, found.splitter) == (WORDS, MERGES, "smollm")
    assert (found.bos, found.eos, found.pad, found.unk) == (1, (2, 1), 2, 0)
    assert found.word(2) == "<|im_end|>" and found.word(None) is None


def test_what_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    for content in (b"", b"GGUF", b"no such thing" * 100):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.gguf"):
            read_gguf(file)
    with pytest.raises(DataError, match=r"b\.gguf"):
        read_gguf(tmp_path / "b.gguf")
