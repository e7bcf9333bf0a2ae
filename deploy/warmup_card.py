"""The model card that `longtail warmup` writes beside the weights: how they were made, what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.config.schema import ClusterConfig
from services.models.files import read_config


@dataclass(frozen=True)
class DrafterResult:
    """`acceptance_length`: a chain as deep as drafter.unroll, at temperature 1, estimated offline. `seconds`: states,
    training and estimate."""

    method: str
    parameters: int
    acceptance_length: float
    seconds: float


@dataclass(frozen=True)
class WarmupResult:
    """What the model card states. Lengths are response tokens at temperature 1; `drafters` as in the folders
    `drafter`, `drafter-<method>` ...; `device` is where the target was made. Losses are per supervised token of
    held-out traces, in nats; None without any."""

    parameters: int
    heldout_pass_rate: float
    heldout_pass_rate_greedy: float
    heldout_prompts: int
    response_len_p50: float
    response_len_p99: float
    response_len_max: int
    target_seconds: float
    drafters: tuple[DrafterResult, ...]
    device: str
    heldout_loss_before: float | None = None
    heldout_loss_after: float | None = None


_CARD = """# {title} model

A {family}-shaped causal language model of {parameters:,} parameters ({layers} layers, hidden size {hidden}) with one
token per character, and {drafters}. It adds up chains of one- and two-digit
numbers in writing, and is far from perfect at it: something for reinforcement learning to improve. It is of no other
use.

Made by `longtail warmup {name}` (seed {seed}; the resolved configuration is in `warmup.yaml`): {steps} supervised
steps of about {tokens:,} tokens on worked traces of generated problems, then {drafter_steps} steps of each drafter on
the model's own responses. Same seed, same machine, same library versions: same weights. The prompts below share no
hash with training.

{measured}
Training data: none but generated sums (reasoning-gym's `chain_sum`). Licence: Apache-2.0, as the rest of Longtail.
"""
_GONE_ON_CARD = """# {title} model

The model of `{start_from}` ({family}, {parameters:,} parameters) after {steps} supervised steps of about {tokens:,}
tokens on {traces}, with {drafters}, made in {drafter_steps} steps each on the model's own responses
(`longtail warmup {name}`, seed {seed}; the resolved configuration is in `warmup.yaml`). Its licence is that of the
model it comes from.

{measured}"""
_MEASURED = """| measured on {heldout_prompts} held-out problems | |
|---|---|
| pass rate at temperature 1 | {heldout_pass_rate:.3f} |
| pass rate, greedy | {heldout_pass_rate_greedy:.3f} |
| response length, median / 99th percentile / longest | {response_len_p50:.0f} / {response_len_p99:.0f} / \
{response_len_max} tokens |
{drafter_rows}
{loss_row}| time for the target, on {device} | {target_seconds:.0f} s |
"""
_LOSS_ROW = "| loss per token of held-out traces, before / after | {0:.3f} / {1:.3f} |\n"
_DRAFTER_ROW = (
    "| {title}: acceptance length, chain of {unroll}, temperature 1, offline | {length:.2f} (made in {s:.0f} s) |"
)
_FAMILY = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_METHOD = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}


def write_card(folder: Path, result: WarmupResult, config: ClusterConfig) -> None:
    """Write `folder`/README.md."""
    warmup, drafters = config.warmup, result.drafters
    named = (f"a one-layer {_METHOD[d.method]} drafter for it ({d.parameters:,} parameters)" for d in drafters)
    card = _CARD if warmup.start == "new" else _GONE_ON_CARD
    family = warmup.model_type if warmup.start == "new" else read_config(folder / "target")["model_type"]
    text = card.format(
        measured=_measured(result, config),
        drafters=" and ".join(named),
        title=config.run.name.removesuffix("-warmup").capitalize(),
        family=_FAMILY[family],
        parameters=result.parameters,
        layers=warmup.num_layers,
        hidden=warmup.hidden_size,
        name=config.run.name,
        seed=config.run.seed,
        steps=warmup.steps,
        tokens=warmup.tokens_per_step,
        drafter_steps=warmup.drafter_steps,
        start_from=config.model.path,
        traces="generated sums" if warmup.traces is None else f"`{warmup.traces.name}`",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _measured(result: WarmupResult, config: ClusterConfig) -> str:
    rows = (
        _DRAFTER_ROW.format(
            title=_METHOD[d.method], unroll=config.drafter.unroll, length=d.acceptance_length, s=d.seconds
        )
        for d in result.drafters
    )
    losses = (result.heldout_loss_before, result.heldout_loss_after)
    return _MEASURED.format(
        **{name: getattr(result, name) for name in result.__dataclass_fields__},
        drafter_rows="\n".join(rows),
        loss_row="" if None in losses else _LOSS_ROW.format(*losses),
    )
