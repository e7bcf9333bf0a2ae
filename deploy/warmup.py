"""`longtail warmup`: make a small model and its first drafters from worked traces, measured on held-out problems.

Three stages: supervised learning of the target (`warmup_target`), responses of what it has become (`warmup_rollouts`),
and a short start for each drafter on those (`warmup_drafter`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from deploy.warmup_card import DrafterResult, WarmupResult, write_card
from deploy.warmup_drafter import warm_drafter
from deploy.warmup_rollouts import WarmupRollouts, heldout_figures, warmup_rollouts
from deploy.warmup_target import new_model, store_as, trace_examples, train_target
from services.config.load import dump_config
from services.config.schema import ClusterConfig
from services.data.source import PromptSets, load_prompts
from services.data.traces import CHARACTERS
from services.models.device import pick_device, pick_dtype
from services.models.tokenizer import EOS, Tokenizer, character_tokenizer, load_tokenizer

VOCAB_MULTIPLE = 16  # unused rows at the end of the embedding; kernels like round sizes
MIN_POSITIONS = 2048
TELL_EVERY = 25


def run_warmup(
    config: ClusterConfig, out: Path, say: Callable[[str], None] = print, keep_target: bool = False
) -> WarmupResult:
    """Write `out`/target, `out`/drafter and `out`/drafter-<method> for each further method; returns the measured
    figures. Seeded by run.seed. `keep_target`: new drafters for the target that an earlier warm-up left there."""
    tell = _with_time(say)
    torch.manual_seed(config.run.seed)
    torch.set_num_threads(config.policy.threads)
    device = pick_device(config.model.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32; drafters train in float32
    disable_progress_bar()
    folder = out / "target"
    tokenizer = load_tokenizer(str(folder)) if keep_target else _write_tokenizer(folder)
    prompts = load_prompts(config, tokenizer)
    tell(f"{len(prompts.train)} training and {len(prompts.heldout)} held-out problems")
    started = time.monotonic()
    if keep_target:
        made = json.loads((out / "warmup.json").read_text(encoding="utf-8"))
        model, target_seconds, made_on = _read_target(folder, config, device), made["target_seconds"], made["device"]
    else:
        model, made_on = _make_target(config, prompts, tokenizer, device, tell), _name(device)
        target_seconds = time.monotonic() - started
        model.save_pretrained(folder)
    rng = Random(f"{config.run.seed}/drafter")
    rollouts = warmup_rollouts(model, tokenizer, prompts, config, rng, tell)
    figures = heldout_figures(rollouts, config)
    tell(
        f"held-out pass rate at temperature 0 / 1: {figures.heldout_pass_rate_greedy:.3f} / "
        f"{figures.heldout_pass_rate:.3f} of {figures.heldout_prompts}; median response {figures.response_len_p50:.0f}"
    )
    result = WarmupResult(
        parameters=sum(p.numel() for p in model.parameters()),
        **asdict(figures),
        target_seconds=target_seconds,
        drafters=_make_drafters(model, rollouts, config, rng, out, tell),
        device=made_on,
    )
    write_card(out, result, config)
    (out / "warmup.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    (out / "warmup.yaml").write_text(dump_config(config), encoding="utf-8")
    return result


def _with_time(say: Callable[[str], None]) -> Callable[[str], None]:
    started = time.monotonic()
    return lambda line: say(f"[{time.monotonic() - started:4.0f} s] {line}")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _read_target(folder: Path, config: ClusterConfig, device: torch.device) -> PreTrainedModel:
    dtype = pick_dtype(config.model.dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def _write_tokenizer(folder: Path) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    core = character_tokenizer(CHARACTERS)
    core.save(str(folder / "tokenizer.json"))
    return Tokenizer(core, folder, (EOS,))


def _make_target(
    config: ClusterConfig, prompts: PromptSets, tokenizer: Tokenizer, device: torch.device, tell: Callable[[str], None]
) -> PreTrainedModel:
    """Trained, in model.dtype, ready for generation."""
    vocab = -(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    positions = max(MIN_POSITIONS, config.rollout.engine.max_len)
    model = new_model(config.warmup, vocab, positions).to(device)
    steps, dtype = config.warmup.steps, pick_dtype(config.model.dtype)

    def on_step(step: int, loss: Tensor) -> None:
        if step % TELL_EVERY == 0 or step == steps:
            tell(f"target step {step}/{steps}  loss {float(loss):.4f}")

    train_target(model, trace_examples(prompts.train, tokenizer, config.run.seed), config.warmup, dtype, on_step)
    store_as(model, dtype)
    model.config.use_cache = model.generation_config.use_cache = True  # was off for training; generation wants it
    return model.eval()


def _make_drafters(
    model: PreTrainedModel,
    rollouts: WarmupRollouts,
    config: ClusterConfig,
    rng: Random,
    out: Path,
    tell: Callable[[str], None],
) -> tuple[DrafterResult, ...]:
    results: list[DrafterResult] = []
    drawn = rng.getstate()
    for method in config.warmup_methods:
        rng.setstate(drawn)  # each method learns from the same responses in the same order
        folder = out / (f"drafter-{method}" if results else "drafter")
        results.append(warm_drafter(model, method, rollouts, config, rng, (out / "target", folder), tell))
        tell(f"{method}: acceptance length {results[-1].acceptance_length:.2f} offline, {folder}")
    return tuple(results)
