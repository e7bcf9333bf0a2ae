"""A run that is small in everything but its parts: random weights, real services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.config.schema import ClusterConfig
from services.core.types import ProgressView
from services.drafter.export import write_drafter_folder
from services.models.drafter import Drafter
from services.models.eagle import Eagle
from services.models.files import read_config
from services.models.layers import model_spec
from services.models.tokenizer import BOS, EOS, PAD, SPECIALS, character_tokenizer

CHARACTERS = "0123456789+-= #\n()*"


def make_model_folder(folder: Path) -> Path:
    """A Qwen3 target of a few thousand weights with its tokenizer, and a drafter inside."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(SPECIALS) + len(CHARACTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    target = folder / "target"
    Qwen3ForCausalLM(config).save_pretrained(target)
    character_tokenizer(CHARACTERS).save(str(target / "tokenizer.json"))
    method = Eagle(model_spec(read_config(target)))
    drafter = Drafter(method)
    drafter.reset(torch.Generator().manual_seed(1))
    write_drafter_folder(drafter.tensors(), method, read_config(target), folder / "drafter")
    return target


def tiny_run(model: Path, runs: Path, **changes: dict[str, Any]) -> ClusterConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "data": {
            "source": {"type": "reasoning_gym", "task": "chain_sum", "template": "{expression}=", "size": 80,
                       "terms": {"median": 3, "sigma": 0.5, "min": 2, "max": 6}},
            "max_prompt_tokens": 64, "heldout_fraction": 0.2,
        },
        "rollout": {
            "num_servers": 2, "group_size": 4, "prompts_per_step": 4, "advance_budget_s": 0.05,
            "engine": {"type": "native", "max_running": 16, "max_len": 192},
            "sampling": {"max_tokens": 120},
        },
        "speculation": {"selector": {"type": "fixed", "strategy": {
            "drafter": "eagle", "depth": 2, "topk": 1, "num_draft_tokens": 3}}},
        "drafter": {"micro_step_budget_s": 0.05, "pack_tokens": 256},
        "policy": {"threads": 1},
        "placement": {"cpus_per_slot": 0.4, "policy_cpus": 0.4},
        "coordinator": {"start_timeout_s": 120.0, "call_timeout_s": 60.0},
        "run": {"dir": str(runs), "steps": 3, "eval_prompts": 4, "compare_prompts": 2, "compare_repeats": 1},
    }  # fmt: skip
    for section, values in changes.items():
        base[section] = {**base.get(section, {}), **values}
    return ClusterConfig.model_validate(base)


def generates(view: ProgressView) -> bool:
    """Whether rollouts are missing yet. How many run is no sign: small groups end between two reports of a server. A
    phase must outlast some looks of the driver, four a second, also on a fast machine: few rollouts at a time."""
    return view.phase == "rollout" and view.rollouts_done < view.rollouts_total
