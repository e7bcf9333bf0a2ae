"""A model folder of each family, tied and untied, taken by path through the whole loop with its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.inputs import load_inputs
from deploy.local import run_local
from services.core.errors import DataError
from services.drafter.export import write_drafter_folder
from services.models.convert import convert_model
from services.models.drafter import Drafter
from services.models.eagle import Eagle
from services.models.files import read_config
from services.models.layers import model_spec
from services.models.tokenizer import load_tokenizer
from tests.deploy.tiny_run import tiny_run
from tests.services.coordinator.world import Recorder
from tests.services.models.gguf_files import WORDS, write_gguf
from tests.services.models.tiny import tiny_model

torch.set_num_threads(1)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("llama", True, {}),
    ("llama", False, {"rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    ("qwen2", True, {"num_key_value_heads": 4}),
    ("qwen3", False, {}),
]


def model_folder(folder: Path, kind: str = "llama", tied: bool = True, **extra: Any) -> Path:
    """Byte-level, with a chat template, end of sequence and padding one token; an untrained EAGLE drafter inside."""
    plain = {k: v for k, v in extra.items() if k != "rope_parameters"}
    model = tiny_model(kind, len(WORDS), tie_word_embeddings=tied, **plain)
    target = folder / "model"
    convert_model(write_gguf(folder / "a.gguf", model), target)
    if "rope_parameters" in extra:
        config = read_config(target) | {"rope_parameters": extra["rope_parameters"]}
        (target / "config.json").write_text(json.dumps(config))
    method = Eagle(model_spec(read_config(target)))
    drafter = Drafter(method)
    drafter.reset(torch.Generator().manual_seed(1))
    write_drafter_folder(drafter.tensors(), method, read_config(target), target / "drafter")
    return target


@pytest.fixture
def by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Rewards that differ within a group, whatever an untrained model says."""
    (tmp_path / "chance.py").write_text("def score(prompt, rollout):\n    return float(rollout.index % 2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"verifier": "function", "function": "chance.score", "timeout_s": 60.0}


@pytest.mark.parametrize(("kind", "tied", "extra"), CASES, ids=lambda v: str(v) if isinstance(v, str | bool) else "")
def test_a_family_goes_through_the_whole_loop(
    tmp_path: Path, by_chance: dict[str, Any], kind: str, tied: bool, extra: dict[str, Any]
) -> None:
    path = model_folder(tmp_path, kind, tied, **extra)
    config = tiny_run(
        path, tmp_path / "runs", reward=by_chance, data={"chat_template": True},
        rollout={"sampling": {"max_tokens": 24}, "prompts_per_step": 2},
        run={"dir": str(tmp_path / "runs"), "steps": 2, "eval_prompts": 0, "compare_prompts": 0},
    )  # fmt: skip
    observer = Recorder()
    summary = run_local(config, observer)
    assert (summary["status"], summary["policy_version"]) == ("finished", 2)
    assert all(m.logprob_gap < 1e-3 and not m.warnings for m in observer.steps)
    rollouts = [r for groups in observer.groups.values() for g in groups for r in g.rollouts]
    assert {v for r in rollouts for v in r.policy_versions} == {0, 1}  # what the trainer published is served
    tokenizer = load_tokenizer(str(path))
    assert all(tokenizer.decode(r.prompt_ids).startswith("[user]") for r in rollouts)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "whole heads"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"max_position_embeddings": 100}, "exceeds the 100 positions"),
        ({"vocab_size": 100}, "do not belong together"),
        ({"model_type": "gemma3"}, "llama, qwen2, qwen3"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_would_compute_something_else_is_refused_before_anything_starts(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    path = model_folder(tmp_path)
    (path / "config.json").write_text(json.dumps(read_config(path) | change))
    with pytest.raises(DataError, match=told):
        load_inputs(tiny_run(path, tmp_path / "runs", data={"chat_template": True}))
