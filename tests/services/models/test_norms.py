"""Norms as one kernel are transformers' norms; torch's own function stands in for the kernel, which needs a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from services.models import norms
from services.models.norms import KINDS, one_kernel, use_fused_norms

SHAPE = {
    "vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = [LlamaConfig(**SHAPE), Qwen2Config(**SHAPE), Qwen3Config(**SHAPE)]
IDS = torch.arange(24).reshape(2, 12)
family = pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)


def model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, parameter in made.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return made


def found(made: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    """Logits and gradients."""
    logits = made(IDS).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), [p.grad for p in made.parameters() if p.grad is not None]


def norms_of(made: PreTrainedModel) -> list[str]:
    return [type(m).__name__ for m in made.modules() if "RMSNorm" in type(m).__name__]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "one_kernel", lambda x, weight: x.dtype == weight.dtype)


@family
def test_every_norm_of_a_family_is_one(config: PretrainedConfig) -> None:
    made = model(config)
    before, weights = norms_of(made), list(made.state_dict())
    use_fused_norms(made)
    assert len(before) > 4 and set(before) <= set(KINDS), "a name that transformers does not use any more"
    assert norms_of(made) == [f"Fused{name}" for name in before] and list(made.state_dict()) == weights
    use_fused_norms(made)
    assert norms_of(made) == [f"Fused{name}" for name in before], "twice is once"


@family
def test_it_computes_what_is_written_out(config: PretrainedConfig, everywhere: None) -> None:
    plain, fused = model(config), model(config)
    use_fused_norms(fused)
    (exact, gradients), (mine, own) = found(plain), found(fused)
    torch.testing.assert_close(mine, exact, atol=1e-6, rtol=1e-5)
    for a, b in zip(own, gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@family
def test_in_half_precision_it_is_no_farther_from_float64(config: PretrainedConfig, everywhere: None) -> None:
    """Rounded once instead of twice."""
    plain, fused, exact = model(config, torch.bfloat16), model(config, torch.bfloat16), model(config, torch.float64)
    use_fused_norms(fused)
    with torch.no_grad():
        for weight, rounded in zip(exact.parameters(), plain.parameters(), strict=True):
            weight.copy_(rounded)
        logits = [m(IDS).logits.double() for m in (plain, fused, exact)]
    written_out, mine = ((found - logits[2]).norm() for found in logits[:2])
    assert mine < 1.1 * written_out < 0.1 * logits[2].norm()


@family
def test_on_a_processor_nothing_changes(config: PretrainedConfig) -> None:
    plain, fused = model(config), model(config)
    use_fused_norms(fused)
    (exact, gradients), (mine, own) = found(plain), found(fused)
    assert torch.equal(mine, exact) and all(torch.equal(a, b) for a, b in zip(own, gradients, strict=True))


def test_a_copy_has_weights_of_its_own(everywhere: None) -> None:
    """As the reference model of a KL term is one."""
    made = model(FAMILIES[2])
    use_fused_norms(made)
    other = copy.deepcopy(made)
    before = other(IDS).logits
    for parameter in made.parameters():
        parameter.data.mul_(1.5)
    assert torch.equal(other(IDS).logits, before) and not torch.equal(made(IDS).logits, before)


def test_mixed_formats_stay_written_out() -> None:
    half, single = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    assert not one_kernel(single, single), "on a processor"
    assert not one_kernel(half, single)
