from __future__ import annotations

import json

import pytest

from services.config.schema import ClusterConfig
from services.core.errors import DataError
from services.core.types import Prompt
from services.data.source import PromptSets, load_prompts
from services.data.split import is_heldout
from services.data.traces import CHARACTERS
from services.models.tokenizer import Tokenizer, character_tokenizer

SUMS = {
    "type": "reasoning_gym",
    "params": {"max_digits": 2},
    "terms": {"median": 4},
    "size": 200,
    "template": "{expression}=",
}


def config(source: dict, data: dict | None = None, **sections: dict) -> ClusterConfig:
    return ClusterConfig.model_validate({"data": {"source": source, **(data or {})}, **sections})


def file_source(tmp_path, count: int = 80, **row) -> dict:
    path = tmp_path / "set.jsonl"
    rows = [{"prompt": f"{i} + 1=", "answer": str(i + 1), "task": "chain_sum"} | row for i in range(count)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return {"type": "file", "path": str(path)}


def test_generated_sets_carry_the_ids_of_rollout_and_share_nothing(tokenizer):
    sets = load_prompts(config(SUMS), tokenizer)
    assert len(sets.train) + len(sets.heldout) == 200
    assert not {p.text for p in sets.train} & {p.text for p in sets.heldout}
    for p in (*sets.train, *sets.heldout):
        assert p.token_ids == tuple(tokenizer.render(p.text, False))
        assert is_heldout(p.text, 0.1) == (p in sets.heldout)


def test_the_shipped_kind_of_tokenizer_counts_the_limit_too(tmp_path):
    core = character_tokenizer(CHARACTERS)
    tokenizer = Tokenizer(core, tmp_path, (2,))
    longest = max(len(p.token_ids) for p in _all(load_prompts(config(SUMS), tokenizer)))
    at_limit = load_prompts(config(SUMS, {"max_prompt_tokens": longest}), tokenizer)
    for p in _all(at_limit):
        assert len(p.token_ids) == len(p.text) + 1 and tokenizer.decode(p.token_ids) == p.text
    with pytest.raises(DataError, match=f"over the limit of {longest - 1}"):
        load_prompts(config(SUMS, {"max_prompt_tokens": longest - 1}), tokenizer)


def _all(sets: PromptSets) -> tuple[Prompt, ...]:
    return (*sets.train, *sets.heldout)


def test_chat_template_reaches_the_ids(tokenizer):
    sets = load_prompts(config(SUMS, {"chat_template": True}, model={"path": "a-chat-model"}), tokenizer)
    assert all(p.token_ids[:5] == (256, 257, 258, 259, 260) for p in sets.train)


def test_generated_problems_over_the_limit_are_not_dropped_in_silence(tokenizer):
    with pytest.raises(DataError, match=r"of 200 generated problems.*over the limit of 60.*max_prompt_tokens"):
        load_prompts(config(SUMS, {"max_prompt_tokens": 60}), tokenizer)


def test_ids_that_do_not_survive_decoding_are_kept_as_rendered():
    """Row 53: text that two id sequences spell is not tokenised again; the rendered ids are the prompt."""

    class Merging:
        unk_token_id = None

        def render(self, prompt_text: str, chat_template: bool) -> list[int]:
            return [1000 + len(prompt_text)] if len(prompt_text) % 2 else list(prompt_text.encode())

    sets = load_prompts(config(SUMS), Merging())
    assert {len(p.token_ids) == 1 for p in sets.train} == {True, False}


def test_prompts_without_ids_are_refused(tmp_path):
    class Empty:
        unk_token_id = None

        def render(self, prompt_text: str, chat_template: bool) -> list[int]:
            return []

    with pytest.raises(DataError, match="no tokens"):
        load_prompts(config(file_source(tmp_path)), Empty())


def test_file_sets_load_and_a_bad_row_stops_or_is_reported(tmp_path, tokenizer):
    source = file_source(tmp_path)
    sets = load_prompts(config(source), tokenizer)
    assert len(sets.train) + len(sets.heldout) == 80 and not sets.skipped
    with open(source["path"], "a", encoding="utf-8") as file:
        file.write('{"prompt": null}\n')
    with pytest.raises(DataError, match="line 81: prompt is null"):
        load_prompts(config(source), tokenizer)
    skipping = load_prompts(config(source | {"on_bad_row": "skip"}), tokenizer)
    assert [row.line for row in skipping.skipped] == [81]
    assert (skipping.train, skipping.heldout) == (sets.train, sets.heldout)


def test_tasks_the_verifier_cannot_score_stop_before_anything_starts(tmp_path, tokenizer):
    source = file_source(tmp_path, task="gsm8k")
    with pytest.raises(DataError, match=r"gsm8k.*reward.verifier to exact or math"):
        load_prompts(config(source), tokenizer)
    assert load_prompts(config(source, reward={"verifier": "math"}), tokenizer).train


def test_fewer_prompts_than_a_step_needs(tmp_path, tokenizer):
    with pytest.raises(DataError, match="prompts_per_step = 16"):
        load_prompts(config(file_source(tmp_path, count=12), {"heldout_fraction": 0.3}), tokenizer)
