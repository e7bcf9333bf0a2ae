"""Tiny random models of the three families, as transformers' own classes and as the engine's target."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from services.models.drafter import Drafter, DrafterMethod
from services.models.eagle import Eagle
from services.models.layers import ModelSpec, model_spec
from services.models.target import TargetModel

torch.set_num_threads(1)

FAMILIES = ("llama", "qwen2", "qwen3")
CLASSES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
CPU = torch.device("cpu")


@lru_cache(maxsize=64)
def tiny_model(kind: str, vocab: int = 32, seed: int = 0, peak: float = 1.0, **extra: Any) -> PreTrainedModel:
    """Random weights, biases and norms included, large enough that every part matters; `peak` sharpens the logits."""
    torch.manual_seed(1000 * seed + vocab)
    more = {"head_dim": 8} if kind == "qwen3" else {}
    config = CLASSES[kind](**(SHAPE | more | {"vocab_size": vocab} | extra))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(0.0, 1.5 / p.shape[1] ** 0.5)
            elif name.endswith("bias"):
                p.normal_(0.0, 0.3)
            else:
                p.uniform_(0.6, 1.4)
        model.lm_head.weight.mul_(peak)
    return model.requires_grad_(False)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy, all of it: transformers' own norms round to float32 whatever the model's number format is."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model.double().eval()


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a publisher sends: state dict under Hugging Face names, a tied head left out."""
    tied = model.config.tie_word_embeddings
    return {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def spec_of(model: PreTrainedModel) -> ModelSpec:
    return model_spec(model.config.to_dict())


def tiny_target(model: PreTrainedModel, columns: int = 400, load: bool = True) -> TargetModel:
    target = TargetModel(spec_of(model), columns, CPU, model.dtype)
    if load:
        target.load(tensors_of(model))
    return target


def causal_mask(start: int, size: int) -> Tensor:
    """Additive [1,1,size,start+size] for `size` queries behind `start` known columns."""
    return torch.full((size, start + size), -torch.inf).triu(start + 1)[None, None]


def random_drafter(
    spec: ModelSpec, scale: float = 1.0, seed: int = 0, method: DrafterMethod | None = None
) -> dict[str, Tensor]:
    """Tensors of an EAGLE drafter, or of another `method`'s: `scale` 0 draws from flat logits, 1 is of the target's own
    size, 5 is loud nonsense."""
    drafter = Drafter(method or Eagle(spec))
    drafter.reset(torch.Generator().manual_seed(seed))
    noise = torch.Generator().manual_seed(seed + 1)
    tensors = {}
    for name, p in drafter.tensors().items():
        spread = scale / p.shape[-1] ** 0.5 if p.dim() == 2 else 0.2
        tensors[name] = p.detach() * min(scale, 1.0) + torch.randn(p.shape, generator=noise) * spread
    return tensors


def contrary_drafter(spec: ModelSpec) -> dict[str, Tensor]:
    """Its hidden state is minus the one it is given: its best token is the target's worst for that state."""
    tensors = {name: torch.zeros_like(t) for name, t in random_drafter(spec).items()}
    tensors["fc.weight"][:, spec.hidden_size :] = -torch.eye(spec.hidden_size)
    return tensors


@lru_cache(maxsize=8)
def markov_model(kind: str, vocab: int = 32, seed: int = 0, peak: float = 1.0) -> PreTrainedModel:
    """A target whose layers add nothing: the next token depends on the last one only, through norm(embed)."""
    torch.manual_seed(seed)
    model = tiny_model(kind, vocab, seed + 500, peak)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embed = model.model.embed_tokens.weight
        embed.mul_(embed.pow(2).mean(-1, keepdim=True).rsqrt())
        model.model.norm.weight.fill_(1.0)
    return model


def perfect_drafter(spec: ModelSpec) -> dict[str, Tensor]:
    """For `markov_model`: hand the embedding through, which is the target's next hidden state."""
    tensors = {name: torch.zeros_like(t) for name, t in random_drafter(spec).items()}
    tensors["fc.weight"][:, : spec.hidden_size] = torch.eye(spec.hidden_size)
    return tensors


@torch.no_grad()
def greedy_path(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Plain argmax decoding by transformers, the whole sequence again for each token; with each choice's margin."""
    ids, margins = list(prompt), []
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2).values
        margins.append(float(best[0] - best[1]))
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], margins
