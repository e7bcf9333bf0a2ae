"""A warm-up that goes on from a model folder: own traces, own tokenizer, tied or untied head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.warmup import run_warmup
from deploy.warmup_lessons import lessons, starting_tokenizer
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError, DataError
from services.data.source import load_prompts
from services.drafter.state import read_drafter
from services.models.convert import convert_model
from services.models.files import read_config, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.models.tokenizer import load_tokenizer
from tests.services.models.gguf_files import WORDS, write_gguf
from tests.services.models.tiny import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[("llama", True), ("qwen2", False)], ids=lambda p: p[0])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model with a chat template, end of sequence and padding one token."""
    kind, tied = request.param
    folder = tmp_path_factory.mktemp("start")
    model = tiny_model(kind, len(WORDS), tie_word_embeddings=tied)
    convert_model(write_gguf(folder / "a.gguf", model), folder / "model")
    return folder / "model"


def traces(folder: Path) -> Path:
    file = folder / "mine.jsonl"
    rows = [{"prompt": f"{i} + 1=", "response": f"#{i + 1}"} for i in range(30)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def config_of(start: Path, **warmup: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"path": str(start), "device": "cpu"},
            "data": {
                "source": {"type": "reasoning_gym", "task": "chain_sum", "template": "{expression}=", "size": 40,
                           "terms": {"median": 2, "sigma": 0.1, "min": 2, "max": 3}},
                "max_prompt_tokens": 64, "heldout_fraction": 0.3, "chat_template": True,
            },
            "rollout": {"engine": {"type": "native", "max_running": 8, "max_len": 160}, "sampling": {"max_tokens": 8}},
            "reward": {"verifier": "exact"},
            "policy": {"threads": 1},
            "drafter": {"unroll": 2, "pack_tokens": 64},
            "run": {"name": "start-warmup"},
            "warmup": {"start": "model", "steps": 12, "tokens_per_step": 256, "micro_batch_tokens": 256,
                       "learning_rate": 1e-2, "drafter_steps": 2, "drafter_rollouts": 4, "eval_prompts": 8} | warmup,
        }
    )  # fmt: skip


def test_a_model_learns_a_users_traces_and_gets_a_drafter(start: Path, tmp_path: Path) -> None:
    config = config_of(start, traces=str(traces(tmp_path)))
    lines: list[str] = []
    result = run_warmup(config, tmp_path / "out", lines.append)
    assert result.heldout_loss_before is not None and result.heldout_loss_after is not None
    assert result.heldout_loss_after < 0.7 * result.heldout_loss_before
    target, spec = tmp_path / "out" / "target", model_spec(read_config(start))
    assert model_spec(read_config(target)) == spec
    assert read_tensors(target).keys() == read_tensors(start).keys()  # a tied head stays tied, an untied one is written
    assert (target / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    prompts = [load_tokenizer(str(f)).render("ab", chat_template=True) for f in (start, target)]
    assert prompts[0] == prompts[1] and load_tokenizer(str(target)).eos_token_ids == (2,)
    assert read_drafter(tmp_path / "out" / "drafter", drafter_method(config.drafter, spec))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "mine.jsonl" in card and str(start) in card and "loss per token of held-out traces" in card
    assert any("held-out traces" in line for line in lines)


def test_no_steps_make_a_drafter_for_the_model_as_it_is(start: Path, tmp_path: Path) -> None:
    result = run_warmup(config_of(start, steps=0), tmp_path)
    before, after = read_tensors(start), read_tensors(tmp_path / "target")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert result.heldout_loss_before == result.heldout_loss_after
    assert [d.method for d in result.drafters] == ["eagle"]


def test_worked_sums_are_spelt_by_the_models_own_tokenizer(start: Path, tmp_path: Path) -> None:
    config = config_of(start)
    tokenizer = starting_tokenizer(config, tmp_path)
    found = lessons(config, load_prompts(config, tokenizer), tokenizer)
    example = next(found.train)
    text = tokenizer.decode(example.ids)
    assert example.ids[-1] == tokenizer.eos_token_id and text.startswith("[user]") and "=>" in text and "#" in text
    assert tokenizer.decode(example.ids[: example.prompt_len]).endswith("=>")  # the template's generation prompt
    assert len(found.heldout) == 8


def test_bad_traces_end_the_warm_up_before_the_model_is_read(start: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(DataError, match="line 2: a row holds"):
        run_warmup(config_of(start, traces=str(file)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("setting", ["warmup.traces=mine.jsonl", "warmup.steps=0"])
def test_a_new_model_learns_chain_sums_only(tmp_path: Path, setting: str) -> None:
    done = CliRunner().invoke(app, ["warmup", "reasoner-warmup", setting, "--out", str(tmp_path)])
    assert done.exit_code == ConfigError.exit_code and "warmup.start" in done.stderr
