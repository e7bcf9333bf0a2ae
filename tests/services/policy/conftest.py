"""Tiny random models and hand-made rollouts for the policy tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from services.core.types import AcceptanceStats, FinishReason, Rollout, SamplingParams
from services.models.sampling import process_logits, sampling_tensors

torch.set_num_threads(1)

VOCAB = 24
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS = {"qwen3": (Qwen3Config, {"head_dim": 8}), "qwen2": (Qwen2Config, {}), "llama": (LlamaConfig, {})}

MakeModel = Callable[..., PreTrainedModel]
MakeRollout = Callable[..., Rollout]


@pytest.fixture
def make_model() -> MakeModel:
    def make(
        kind: str = "qwen3", tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 2
    ):
        torch.manual_seed(seed)
        cls, extra = CONFIGS[kind]
        config = cls(**(SHAPE | extra | {"num_hidden_layers": layers}), tie_word_embeddings=tied)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()

    return make


@pytest.fixture
def make_rollout() -> MakeRollout:
    """A rollout of random ids (or the given ones), logprobs -2 unless given."""

    def make(index: int = 0, prompt: int = 4, response: int = 6, group: str = "g", **change: object) -> Rollout:
        g = torch.Generator().manual_seed(crc32(f"{group} {index} {prompt} {response}".encode()))
        fields: dict[str, object] = {
            "group_id": group,
            "prompt_id": f"p-{group}",
            "index": index,
            "seed": index,
            "prompt_ids": tuple(torch.randint(0, VOCAB, (prompt,), generator=g).tolist()),
            "response_ids": tuple(torch.randint(0, VOCAB, (response,), generator=g).tolist()),
            "text": "",
            "finish_reason": FinishReason.STOP,
            "sampling": SamplingParams(),
            "policy_versions": (0,),
            "drafter_versions": (),
            "acceptance": AcceptanceStats(),
        }
        fields |= change
        fields.setdefault("rollout_logprobs", (-2.0,) * len(fields["response_ids"]))  # type: ignore[arg-type]
        return Rollout(**fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def sample_rollout(make_rollout: MakeRollout) -> MakeRollout:
    """A rollout really sampled from a model, one token at a time, with the processed distribution's logprobs."""

    @torch.no_grad()
    def make(model: PreTrainedModel, index: int, prompt: int, response: int, group: str, sampling: SamplingParams):
        base = make_rollout(index, prompt, response, group)
        g = torch.Generator().manual_seed(index)
        ids, logprobs = list(base.prompt_ids), []
        for _ in range(response):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:].float()
            dist = process_logits(logits, sampling_tensors([sampling], logits.device)).log_softmax(-1)[0]
            token = int(torch.multinomial(dist.exp(), 1, generator=g))
            ids.append(token)
            logprobs.append(float(dist[token]))
        return make_rollout(
            index, prompt, response, group, prompt_ids=base.prompt_ids, response_ids=tuple(ids[prompt:]),
            rollout_logprobs=tuple(logprobs), sampling=sampling,
        )  # fmt: skip

    return make


@pytest.fixture
def model_folder(make_model: MakeModel, tmp_path: Path) -> Callable[..., Path]:
    def save(kind: str = "qwen3", tied: bool = True, layers: int = 2) -> Path:
        folder = tmp_path / f"{kind}-{tied}-{layers}"
        make_model(kind, tied, layers=layers).save_pretrained(folder)
        return folder

    return save
