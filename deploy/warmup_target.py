"""First stage of the warm-up: teach a small model worked traces, so that reinforcement learning has something to
sharpen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from services.config.warmup import WarmupConfig
from services.core.types import Prompt
from services.data.trace_files import Trace
from services.data.traces import CHARACTERS, chain_sum_trace
from services.models.tokenizer import BOS, EOS, PAD, Tokenizer

WARMUP_FRACTION, FINAL_LR = 0.05, 0.02
_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@dataclass(frozen=True)
class Example:
    """`ids` is prompt + trace + end of sequence; the first `prompt_len` tokens are not trained on."""

    ids: tuple[int, ...]
    prompt_len: int


def new_model(config: WarmupConfig, vocab_size: int, max_positions: int) -> PreTrainedModel:
    """Random float32 weights from torch's global seed."""
    config_class, model_class = _FAMILIES[config.model_type]
    return model_class(
        config_class(
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=max_positions,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            use_cache=False,
        )
    )


def trace_examples(prompts: Sequence[Prompt], tokenizer: Tokenizer, seed: int) -> Iterator[Example]:
    """Training prompts in random order for ever, each time with a newly worded trace."""
    encode = _by_table(tokenizer) if tokenizer.unk_token_id is not None else tokenizer.encode
    rng = Random(f"{seed}/warmup")
    while True:
        for prompt in rng.sample(prompts, len(prompts)):
            trace = encode(chain_sum_trace(prompt.text, rng))
            yield Example((*prompt.token_ids, *trace, tokenizer.eos_token_id), len(prompt.token_ids))


def _by_table(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Of the new model's tokenizer, one id per character: ten times as fast as to ask it."""
    ids = {character: tokenizer.encode(character)[0] for character in CHARACTERS}
    return lambda text: [ids[character] for character in text]


def repeated(traces: Sequence[Trace], seed: int) -> Iterator[Example]:
    """The traces in random order for ever."""
    rng = Random(f"{seed}/warmup")
    while True:
        yield from (Example(trace.ids, trace.prompt_len) for trace in rng.sample(traces, len(traces)))


def train_target(
    model: PreTrainedModel,
    examples: Iterator[Example],
    config: WarmupConfig,
    dtype: torch.dtype,
    on_step: Callable[[int, Tensor], None],
) -> None:
    """`steps` AdamW updates of about `tokens_per_step` tokens each; cosine schedule. Weights stay float32; with another
    `dtype` matrices are multiplied in it (autocast). `on_step` gets the step and its loss, which is still on the
    device: reading it waits for the GPU."""
    device = model.device
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        fused=device.type == "cuda",
    )
    model.train()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(step / config.steps)
        batch = _take(examples, config.tokens_per_step)
        loss = _accumulate(model, batch, config.micro_batch_tokens, autocast(device, dtype))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step + 1, loss)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype, dtype != torch.float32)


def store_as(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters in place. Not `model.to`: that would cast the rotary frequencies too, and positions would be
    off by whole turns at the end of a long response."""
    for p in model.parameters():
        p.data = p.data.to(dtype)


def _schedule(progress: float) -> float:
    rise = min(1.0, progress / WARMUP_FRACTION)
    return rise * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


def _take(examples: Iterator[Example], tokens: int) -> list[Example]:
    taken: list[Example] = []
    while tokens > 0:
        taken.append(next(examples))
        tokens -= len(taken[-1].ids)
    return taken


def _accumulate(
    model: PreTrainedModel, batch: Sequence[Example], micro_tokens: int, precision: AbstractContextManager[object]
) -> Tensor:
    """Gradient of the mean loss per supervised token, over micro-batches of similar length; returns that mean."""
    total = torch.zeros((), device=model.device)
    for loss in _losses(model, batch, micro_tokens, precision):
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel, examples: Sequence[Example], micro_tokens: int, precision: AbstractContextManager[object]
) -> float:
    """Cross-entropy per supervised token, in nats."""
    return float(sum(_losses(model, examples, micro_tokens, precision)))


def _losses(
    model: PreTrainedModel, batch: Sequence[Example], micro_tokens: int, precision: AbstractContextManager[object]
) -> Iterator[Tensor]:
    """Each micro-batch's part of the mean loss per supervised token. Masks come from lengths, never from ids: the end
    of sequence may be the padding token as well."""
    supervised = sum(len(e.ids) - e.prompt_len for e in batch)
    ordered = sorted(batch, key=lambda e: len(e.ids))
    for span in padded_runs([len(e.ids) for e in ordered], micro_tokens):
        ids, mask = _pad(ordered[span], model.device)
        with precision:
            logits = model(input_ids=ids[:, :-1]).logits  # right padding: causal attention never sees it
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        yield (losses * mask[:, 1:].flatten()).sum() / supervised


def padded_runs(lengths: Sequence[int], tokens: int) -> Iterator[slice]:
    """Cut sequences of rising `lengths` into runs of neighbours whose padded size stays within `tokens` (at least one
    sequence each)."""
    start = 0
    for end, length in enumerate(lengths):
        if end > start and length * (end - start + 1) > tokens:
            yield slice(start, end)
            start = end
    if lengths:
        yield slice(start, len(lengths))


def _pad(batch: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(e.ids) for e in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, example.prompt_len : len(example.ids)] = 1.0
    if device.type == "cuda":  # from pinned memory the copy does not wait for the GPU to come to it
        ids, mask = ids.pin_memory(), mask.pin_memory()
    return ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)
