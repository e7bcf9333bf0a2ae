"""A run folder with a real checkpoint, and targets with drafters, small enough to judge in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.config.load import dump_config
from services.config.schema import ClusterConfig
from services.core.checkpoints import CheckpointNote, DataPosition
from services.drafter.state import initial_drafter_state
from services.models.files import read_config
from services.models.layers import ModelSpec, model_spec
from services.models.tokenizer import BOS, EOS, PAD, SPECIALS, character_tokenizer
from services.policy.checkpoint import KIND, take_snapshot
from services.policy.service import build_policy_service
from services.weights.checkpoint import CheckpointWriter
from tests.deploy.tiny_run import CHARACTERS, tiny_run

WAIT_S = 120.0


def make_target(folder: Path, layers: int = 4) -> Path:
    """As `tiny_run`'s, deep enough for EAGLE-3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(SPECIALS) + len(CHARACTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    character_tokenizer(CHARACTERS).save(str(folder / "tokenizer.json"))
    return folder


def spec_of(target: Path) -> ModelSpec:
    return model_spec(read_config(target))


def make_run(runs: Path, model: Path, drafter: Path, **changes: dict[str, Any]) -> Path:
    """A run folder as after its third step: another policy than the model's folder, and a drafter that has trained."""
    config = tiny_run(model, runs, drafter={"path": str(drafter), **changes.pop("drafter", {})}, **changes)
    run = runs / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(config))
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 3, "drafter_micro_steps": 9}) + "\n")
    write_checkpoint(run, config)
    return run


def write_checkpoint(run: Path, config: ClusterConfig, step: int = 3) -> None:
    trainer = build_policy_service(config)._trainer
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.01)
    trainer.version = 4
    state = initial_drafter_state(config)
    state["tensors"] = {name: tensor * 1.5 for name, tensor in state["tensors"].items()}
    note = CheckpointNote(step, 5, DataPosition("feed1234"))
    writer = CheckpointWriter(run / "checkpoints", KIND, "test", None)
    writer.save(take_snapshot(trainer, spec_of(Path(config.model.path)), note, {**state, "total_steps": 77}))
    writer.wait(WAIT_S)
