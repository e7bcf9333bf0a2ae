"""Targets and drafters of arbitrary small shapes, as model folders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from services.models.drafter import DrafterMethod
from services.models.eagle import Eagle
from services.models.eagle3 import Eagle3
from services.models.layers import model_spec
from services.models.target import target_names

CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class Shape:
    """A target, its drafter's method, and the draft tokens of a head of its own (None: the target's head)."""

    kind: str
    method: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    tied: bool
    dtype: torch.dtype
    draft_ids: tuple[int, ...] | None

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": [CLASSES[self.kind]],
            "model_type": self.kind,
            "hidden_size": self.heads * self.head_dim,
            "intermediate_size": 12,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "max_position_embeddings": 64,
            "tie_word_embeddings": self.tied,
        }

    def drafter(self) -> DrafterMethod:
        target = model_spec(self.config)
        return Eagle(target) if self.method == "eagle" else Eagle3(target, (0, 1, self.layers - 2), self.draft_ids)

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        numbers = torch.Generator().manual_seed(seed)
        names = self.drafter().names()
        return {name: torch.randn(shape, generator=numbers).to(self.dtype) for name, shape in names.items()}

    def write_target(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        numbers = torch.Generator().manual_seed(7)
        names = target_names(model_spec(self.config))
        tensors = {name: torch.randn(shape, generator=numbers) for name, shape in names.items()}
        save_file(tensors, folder / "w.safetensors")
        return folder


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 2))
    method = draw(st.sampled_from(["eagle", "eagle3"]))
    vocab = draw(st.integers(4, 20))
    own = st.sets(st.integers(0, vocab - 1), min_size=1).map(lambda ids: tuple(sorted(ids)))
    return Shape(
        kind=draw(st.sampled_from(sorted(CLASSES))),
        method=method,
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        layers=draw(st.integers(4, 7)),
        vocab=vocab,
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draft_ids=draw(st.none() | own) if method == "eagle3" else None,
    )
