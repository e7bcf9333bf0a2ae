"""The converted SmolLM2 has the tokens that the original tokenizer gives, and says sensible things."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.models.files import read_config
from services.models.layers import model_spec
from services.models.tokenizer import Tokenizer, load_tokenizer
from tests.services.models.smollm2 import FOLDER, needs_smollm2

pytestmark = needs_smollm2

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(FOLDER))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("\n\n42", [1116, 36, 34]),
        ("\n\n\n", [16506]),
        ("1234", [33, 34, 35, 36]),
        ("x=1;\t y", [104, 45, 33, 43, 197, 329]),
        (" héllo", [294, 2756, 31394]),
        (" 日本", [17097, 241, 115, 40993]),
        ("😀", [10813, 242, 218]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    ],
)
def test_known_tokens(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids
    if "<|" not in text:
        assert tokenizer.decode(ids) == text


def test_the_chat_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render("What is 2+2?", chat_template=True)
    assert [ids[0], ids[-3:]] == [1, [520, 9531, 198]]  # "<|im_start|>", then "assistant" and its line break
    assert tokenizer.decode(ids) == f"system\n{SYSTEM}\nuser\nWhat is 2+2?\nassistant\n"
    assert ids.count(1) == 3 and ids.count(2) == 2  # the end of sequence, also padding, closes the turns


def test_special_ids(tokenizer: Tokenizer) -> None:
    config, spec = read_config(FOLDER), model_spec(read_config(FOLDER))
    assert tokenizer.eos_token_ids == (2,) and config["pad_token_id"] == 2 and tokenizer.unk_token_id is None
    assert (spec.tied, spec.vocab_size, spec.num_heads, spec.num_kv_heads) == (True, tokenizer.vocab_size, 9, 3)


@pytest.mark.slow
def test_it_knows_the_capital_of_france(tokenizer: Tokenizer) -> None:
    """Weights in the wrong order of rows would say nothing sensible."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ids = tokenizer.render("Name the capital of France.", chat_template=True)
    prompt = len(ids)
    with torch.inference_mode():
        for _ in range(8):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert "Paris" in tokenizer.decode(ids[prompt:])
