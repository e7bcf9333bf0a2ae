"""Configuration of the warm-up, the one section that no run reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.config.section import Section


class WarmupConfig(Section):
    """`longtail warmup`: how a small model and its first drafters are made, from worked traces. Matrices are multiplied
    and weights saved in model.dtype. `start` "model": go on from model.path, whose shape and tokenizer stay; "new": a
    model of the shape below. `traces`: JSONL rows of {"prompt", "response"} or {"text"} to imitate; None: worked
    chain sums for data.source's prompts."""

    start: Literal["new", "model"] = "new"
    traces: Path | None = None
    model_type: Literal["qwen3", "llama", "qwen2"] = "qwen3"
    hidden_size: int = Field(96, ge=8)
    intermediate_size: int = Field(288, ge=8)
    num_layers: int = Field(8, ge=1)
    num_heads: int = Field(6, ge=1)
    num_kv_heads: int = Field(3, ge=1)
    head_dim: int = Field(16, ge=2)
    steps: int = Field(600, ge=0)  # 0: drafters alone, for model.path as it is
    tokens_per_step: int = Field(8192, ge=256)
    micro_batch_tokens: int = Field(4096, ge=64)  # of one forward pass, padding included
    learning_rate: float = Field(2e-3, gt=0)
    # The first goes to the folder `drafter`, each other to `drafter-<method>`; empty: drafter.method alone.
    drafter_methods: tuple[Literal["eagle", "eagle3"], ...] = ()
    drafter_steps: int = Field(60, ge=0)
    drafter_learning_rate: float = Field(1e-3, gt=0)
    drafter_rollouts: int = Field(512, ge=1)  # responses that the drafters learn from
    eval_prompts: int = Field(512, ge=1)
    max_running: int = Field(128, ge=1)  # responses generated at a time

    @model_validator(mode="after")
    def _shape(self) -> WarmupConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.model_type == "llama" and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} of a Llama must be a multiple of num_heads {self.num_heads}"
            )
        if self.start == "new" and (self.traces is not None or not self.steps):
            raise ValueError(
                "a new model spells chain sums only and has to learn them: for traces of your own, or steps 0, set "
                "warmup.start to model and model.path to a model folder"
            )
        if len(set(self.drafter_methods)) < len(self.drafter_methods):
            raise ValueError(f"drafter_methods {list(self.drafter_methods)} names one twice")
        return self
