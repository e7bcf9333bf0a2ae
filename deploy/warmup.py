"""`longtail warmup`: make a small model, or teach one that is there, and make its first drafters; measured on held-out
problems.

Three stages: supervised learning of the target (`warmup_lessons`, `warmup_target`), responses of what it has become
(`warmup_rollouts`), and a short start for each drafter on those (`warmup_drafter`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from deploy.warmup_card import DrafterResult, WarmupResult, write_card
from deploy.warmup_drafter import warm_drafter
from deploy.warmup_lessons import Lessons, lessons, save_target, starting_model, starting_tokenizer
from deploy.warmup_rollouts import WarmupRollouts, heldout_figures, warmup_rollouts
from deploy.warmup_target import autocast, mean_loss, store_as, train_target
from services.config.load import dump_config
from services.config.schema import ClusterConfig
from services.data.source import load_prompts
from services.models.device import pick_device, pick_dtype
from services.models.tokenizer import load_tokenizer

TELL_EVERY = 25


@dataclass(frozen=True)
class _Made:
    """The target, trained, in model.dtype, ready for generation; losses per supervised token on held-out traces."""

    model: PreTrainedModel
    seconds: float
    device: str
    loss_before: float | None
    loss_after: float | None


def run_warmup(
    config: ClusterConfig, out: Path, say: Callable[[str], None] = print, keep_target: bool = False
) -> WarmupResult:
    """Write `out`/target, `out`/drafter and `out`/drafter-<method> for each further method; returns the measured
    figures. Seeded by run.seed. `keep_target`: new drafters for the target that an earlier warm-up left there."""
    tell = _with_time(say)
    torch.manual_seed(config.run.seed)
    torch.set_num_threads(config.policy.threads)
    device = pick_device(config.model.device)
    disable_progress_bar()
    folder = out / "target"
    tokenizer = load_tokenizer(str(folder)) if keep_target else starting_tokenizer(config, folder)
    prompts = load_prompts(config, tokenizer)
    tell(f"{len(prompts.train)} training and {len(prompts.heldout)} held-out problems")
    if keep_target:
        made = _read_target(out, config, device)
    else:
        to_learn = lessons(config, prompts, tokenizer)
        made = _make_target(config, starting_model(config, tokenizer, device), to_learn, tell)
        save_target(made.model, config, folder)
    rng = Random(f"{config.run.seed}/drafter")
    rollouts = warmup_rollouts(made.model, tokenizer, prompts, config, rng, tell)
    figures = heldout_figures(rollouts, config)
    tell(
        f"held-out pass rate at temperature 0 / 1: {figures.heldout_pass_rate_greedy:.3f} / "
        f"{figures.heldout_pass_rate:.3f} of {figures.heldout_prompts}; median response {figures.response_len_p50:.0f}"
    )
    result = WarmupResult(
        parameters=sum(p.numel() for p in made.model.parameters()),
        **asdict(figures),
        target_seconds=made.seconds,
        drafters=_make_drafters(made.model, rollouts, config, rng, out, tell),
        device=made.device,
        heldout_loss_before=made.loss_before,
        heldout_loss_after=made.loss_after,
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


def _read_target(out: Path, config: ClusterConfig, device: torch.device) -> _Made:
    """What an earlier warm-up left."""
    dtype = pick_dtype(config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(out / "target", dtype=dtype, local_files_only=True)
    then = json.loads((out / "warmup.json").read_text(encoding="utf-8"))
    losses = then.get("heldout_loss_before"), then.get("heldout_loss_after")
    return _Made(model.to(device).eval(), then["target_seconds"], then["device"], *losses)


def _make_target(
    config: ClusterConfig, model: PreTrainedModel, to_learn: Lessons, tell: Callable[[str], None]
) -> _Made:
    started, steps, dtype = time.monotonic(), config.warmup.steps, pick_dtype(config.model.dtype)

    def on_step(step: int, loss: Tensor) -> None:
        if step % TELL_EVERY == 0 or step in (1, steps):
            tell(f"target step {step}/{steps}  loss {float(loss):.4f}")

    def heldout_loss() -> float | None:
        if not to_learn.heldout:
            return None
        return mean_loss(
            model.eval(), to_learn.heldout, config.warmup.micro_batch_tokens, autocast(model.device, dtype)
        )

    before = heldout_loss()
    train_target(model, to_learn.train, config.warmup, dtype, on_step)
    after = heldout_loss()
    if before is not None and after is not None:
        tell(f"loss per token of {len(to_learn.heldout)} held-out traces: {before:.4f} before, {after:.4f} after")
    store_as(model, dtype)
    model.config.use_cache = model.generation_config.use_cache = True  # was off for training; generation wants it
    return _Made(model.eval(), time.monotonic() - started, _name(model.device), before, after)


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
