"""Text while it comes: whole characters, nothing of a stop string, and in the end exactly the text of all ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from services.gateway.openai.choice import Token
from services.gateway.openai.text import TextStream
from services.models.tokenizer import Tokenizer
from services.rollout.stops import find_stop
from tests.services.models.test_tokenizer import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer(), Path(), (256,))


def fallback_tokenizer() -> Tokenizer:
    """As Llama's: a few words, and a token for each byte where there is none; a run of bytes is decoded as a whole."""
    words = ["<unk>", "▁a", "▁b", "c", "é"]
    vocab = {w: i for i, w in enumerate(words)} | {f"<0x{b:02X}>": len(words) + b for b in range(256)}
    core = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return Tokenizer(core, Path(), (0,))


FALLBACK = fallback_tokenizer()


def told(codec: Tokenizer, parts: list[list[int]], stops: tuple[str, ...] = ()) -> tuple[list[str], str]:
    stream = TextStream(codec, stops)  # type: ignore[arg-type]
    shown = [stream.push(part) for part in parts]
    return shown, stream.finish()


@st.composite
def split_ids(draw: st.DrawFn, ids: st.SearchStrategy[list[int]]) -> list[list[int]]:
    """A response in parts of several tokens, as accepted runs are."""
    all_ids, parts = draw(ids), list[list[int]]()
    while all_ids:
        size = draw(st.integers(1, 5))
        parts.append(all_ids[:size])
        all_ids = all_ids[size:]
    return parts


TEXTS = st.text(alphabet="ab 世é😀\n", max_size=20).map(BYTES.encode)


@settings(max_examples=150, deadline=None)
@given(
    split_ids(st.one_of(TEXTS, st.lists(st.integers(0, 255), max_size=20))),
    st.lists(st.text("ab世", min_size=1, max_size=3), max_size=3),
)
def test_row_22_the_parts_are_the_text_of_all_ids(parts: list[list[int]], stops: list[str]) -> None:
    shown, rest = told(BYTES, parts, tuple(stops))
    text = BYTES.decode([i for part in parts for i in part])
    cut = find_stop(text, stops)
    assert "".join(shown) + rest == (text if cut is None else text[:cut])


@settings(max_examples=150, deadline=None)
@given(split_ids(st.lists(st.one_of(st.integers(1, 4), st.sampled_from([5 + b for b in "é世".encode()])), max_size=12)))
def test_row_22_also_where_a_run_of_bytes_is_decoded_as_a_whole(parts: list[list[int]]) -> None:
    """One wrong byte turns the whole run before it into replacement characters: nothing of it may be sent early."""
    shown, rest = told(FALLBACK, parts)
    assert "".join(shown) + rest == FALLBACK.decode([i for part in parts for i in part])


def test_row_22_a_character_comes_when_its_last_byte_does() -> None:
    ids = BYTES.encode("A 世😀")
    shown, rest = told(BYTES, [[i] for i in ids])
    assert shown == ["A", " ", "", "", "世", "", "", "", "😀"] and rest == ""


def test_row_4_nothing_of_a_stop_string_is_shown() -> None:
    """The stop lies inside a run of accepted tokens, begins in an earlier one, and is followed by more."""
    ids = BYTES.encode("one STOPtwo")
    assert told(BYTES, [ids[:6], ids[6:]], ("STOP",)) == (["one ", ""], "")
    assert told(BYTES, [ids[:6], BYTES.encode("x")], ("STOP",)) == (["one ", "STx"], "")
    assert told(BYTES, [ids[:6]], ("STOP",)) == (["one "], "ST")  # the budget ended there


@pytest.mark.parametrize(("text", "shown"), [("é", "é"), ("\xff", "bytes:\\xff")])
def test_a_part_of_a_character_is_shown_as_bytes(text: str, shown: str) -> None:
    data = text.encode() if text == "é" else b"\xff"
    assert Token(data, 0.0, 0).shown == shown


def test_tokens_know_their_bytes() -> None:
    assert b"".join(BYTES.token_bytes(i) for i in BYTES.encode("a 世\n")) == "a 世\n".encode()
    assert FALLBACK.token_bytes(5 + 0xE4) == b"\xe4" and FALLBACK.token_bytes(4) == "é".encode()
