"""Tiny targets, drafters and hidden states for the drafter tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from services.config.drafter import DrafterConfig
from services.config.schema import ClusterConfig, ModelConfig
from services.drafter.export import write_drafter_folder
from services.drafter.head import TargetHead
from services.drafter.trainer import DrafterTrainer
from services.models.drafter import Drafter, DrafterMethod
from services.models.files import read_config
from services.models.hidden import HiddenStates
from services.models.layers import ModelSpec, model_spec
from services.models.methods import drafter_method

torch.set_num_threads(1)

VOCAB, HIDDEN = 24, 32
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
METHODS = ("eagle", "eagle3")
CONFIGS = {"qwen3": (Qwen3Config, {"head_dim": 8}), "qwen2": (Qwen2Config, {}), "llama": (LlamaConfig, {})}


@pytest.fixture
def make_spec() -> Callable[..., ModelSpec]:
    def make(kind: str = "qwen3", tied: bool = False) -> ModelSpec:
        return model_spec(SHAPE | CONFIGS[kind][1] | {"model_type": kind, "tie_word_embeddings": tied})

    return make


@pytest.fixture
def make_method(make_spec) -> Callable[..., DrafterMethod]:
    def make(name: str = "eagle", kind: str = "qwen3") -> DrafterMethod:
        return drafter_method(DrafterConfig(method=name), make_spec(kind))

    return make


@pytest.fixture
def make_drafter() -> Callable[..., Drafter]:
    def make(method: DrafterMethod, seed: int = 0) -> Drafter:
        drafter = Drafter(method)
        drafter.reset(torch.Generator().manual_seed(seed))
        with torch.no_grad():  # weights large enough that attention and MLP matter
            for p in drafter.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + 1)) * 0.15)
        return drafter

    return make


@pytest.fixture
def make_states() -> Callable[..., list[HiddenStates]]:
    """Sequences of (prompt, response) lengths with random ids and hidden states, as the method `name` reads them."""

    def make(
        *lengths: tuple[int, int], name: str = "eagle", version: int = 0, seed: int = 0, hidden: int = HIDDEN
    ) -> list[HiddenStates]:
        g = torch.Generator().manual_seed(seed)
        return [
            HiddenStates(
                torch.randint(0, VOCAB, (p + r,), generator=g),
                torch.randn(p + r, hidden, generator=g),
                torch.arange(p + r) >= p,
                version,
                torch.randn(p + r, 3 * hidden, generator=g) if name == "eagle3" else None,
            )
            for p, r in lengths
        ]

    return make


@pytest.fixture
def make_head() -> Callable[..., TargetHead]:
    def make(seed: int = 7, version: int = 0) -> TargetHead:
        g = torch.Generator().manual_seed(seed)
        return TargetHead(
            torch.randn(VOCAB, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g) * 0.3, version
        )

    return make


@pytest.fixture
def make_trainer(make_spec, make_head) -> Callable[..., DrafterTrainer]:
    def make(temperature: float = 1.0, kind: str = "qwen3", **config: object) -> DrafterTrainer:
        trainer = DrafterTrainer(make_spec(kind), DrafterConfig(**config), temperature, torch.device("cpu"))
        trainer.load_head(make_head())
        return trainer

    return make


@pytest.fixture
def model_folder(tmp_path: Path, make_drafter) -> Callable[..., Path]:
    """A target's folder with its drafter inside."""

    def save(kind: str = "qwen3", tied: bool = True, name: str = "eagle") -> Path:
        torch.manual_seed(0)
        cls, extra = CONFIGS[kind]
        folder = tmp_path / f"{kind}-{tied}-{name}"
        AutoModelForCausalLM.from_config(cls(**SHAPE, **extra, tie_word_embeddings=tied)).save_pretrained(folder)
        config = read_config(folder)
        method = drafter_method(DrafterConfig(method=name), model_spec(config))
        write_drafter_folder(make_drafter(method).tensors(), method, config, folder / "drafter")
        return folder

    return save


@pytest.fixture
def make_config() -> Callable[..., ClusterConfig]:
    def make(folder: Path, **drafter: object) -> ClusterConfig:
        return ClusterConfig(model=ModelConfig(path=str(folder), device="cpu"), drafter=DrafterConfig(**drafter))

    return make
