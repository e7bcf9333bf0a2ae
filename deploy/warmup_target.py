"""First stage of the warm-up: teach a small Qwen3-shaped model worked traces, so that reinforcement learning has
something to sharpen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.config.schema import WarmupConfig

MICRO_BATCH_TOKENS = 4096
WARMUP_FRACTION, FINAL_LR = 0.05, 0.02


@dataclass(frozen=True)
class Example:
    """`ids` is prompt + trace + end of sequence; the first `prompt_len` tokens are not trained on."""

    ids: tuple[int, ...]
    prompt_len: int


def new_model(
    config: WarmupConfig, vocab_size: int, max_positions: int, eos: int, pad: int, bos: int
) -> Qwen3ForCausalLM:
    """Random weights from torch's global seed."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=max_positions,
            tie_word_embeddings=True,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
            use_cache=False,
        )
    )


def train_target(
    model: Qwen3ForCausalLM, examples: Iterator[Example], config: WarmupConfig, on_step: Callable[[int, float], None]
) -> None:
    """`steps` AdamW updates of about `tokens_per_step` tokens each; cosine schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    model.train()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(step / config.steps)
        loss = _accumulate(model, _take(examples, config.tokens_per_step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step + 1, loss)


def _schedule(progress: float) -> float:
    rise = min(1.0, progress / WARMUP_FRACTION)
    return rise * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


def _take(examples: Iterator[Example], tokens: int) -> list[Example]:
    taken: list[Example] = []
    while tokens > 0:
        taken.append(next(examples))
        tokens -= len(taken[-1].ids)
    return taken


def _accumulate(model: Qwen3ForCausalLM, batch: Sequence[Example]) -> float:
    """Gradient of the mean loss per supervised token, over micro-batches of similar length."""
    supervised = sum(len(e.ids) - e.prompt_len for e in batch)
    total = 0.0
    for micro in micro_batches(sorted(batch, key=lambda e: len(e.ids)), MICRO_BATCH_TOKENS):
        ids, mask = _pad(micro, next(model.parameters()).device)
        logits = model(input_ids=ids[:, :-1]).logits.float()  # right padding: causal attention never sees it
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * mask[:, 1:].flatten()).sum() / supervised
        loss.backward()
        total += loss.item()
    return total


def micro_batches(ordered: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    """Runs of neighbours whose padded size stays within `tokens` (at least one example each)."""
    micro: list[Example] = []
    for example in ordered:
        if micro and len(example.ids) * (len(micro) + 1) > tokens:
            yield micro
            micro = []
        micro.append(example)
    yield micro


def _pad(batch: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(e.ids) for e in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, example.prompt_len : len(example.ids)] = 1.0
    return ids.to(device), mask.to(device)
