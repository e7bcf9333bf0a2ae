"""The model card that `longtail warmup` writes beside the weights: how they were made, what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.config.schema import ClusterConfig


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
    `drafter`, `drafter-<method>` ...; `device` is where the target was made."""

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


_CARD = """# {title} model

A {family}-shaped causal language model of {parameters:,} parameters ({layers} layers, hidden size {hidden}) with one
token per character, and {drafters}. It adds up chains of one- and two-digit
numbers in writing, and is far from perfect at it: something for reinforcement learning to improve. It is of no other
use.

Made by `longtail warmup {name}` (seed {seed}; the resolved configuration is in `warmup.yaml`): {steps} supervised
steps of about {tokens:,} tokens on worked traces of generated problems, then {drafter_steps} steps of each drafter on
the model's own responses. Same seed, same machine, same library versions: same weights. The prompts below share no
hash with training.

| measured on {heldout_prompts} held-out problems | |
|---|---|
| pass rate at temperature 1 | {heldout_pass_rate:.3f} |
| pass rate, greedy | {heldout_pass_rate_greedy:.3f} |
| response length, median / 99th percentile / longest | {response_len_p50:.0f} / {response_len_p99:.0f} / \
{response_len_max} tokens |
{drafter_rows}
| time for the target, on {device} | {target_seconds:.0f} s |

Training data: none but generated sums (reasoning-gym's `chain_sum`). Licence: Apache-2.0, as the rest of Longtail.
"""
_DRAFTER_ROW = (
    "| {title}: acceptance length, chain of {unroll}, temperature 1, offline | {length:.2f} (made in {s:.0f} s) |"
)
_FAMILY = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_METHOD = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}


def write_card(folder: Path, result: WarmupResult, config: ClusterConfig) -> None:
    """Write `folder`/README.md."""
    warmup, drafters = config.warmup, result.drafters
    named = (f"a one-layer {_METHOD[d.method]} drafter for it ({d.parameters:,} parameters)" for d in drafters)
    rows = (
        _DRAFTER_ROW.format(
            title=_METHOD[d.method], unroll=config.drafter.unroll, length=d.acceptance_length, s=d.seconds
        )
        for d in drafters
    )
    text = _CARD.format(
        **{name: getattr(result, name) for name in result.__dataclass_fields__} | {"drafters": " and ".join(named)},
        drafter_rows="\n".join(rows),
        title=config.run.name.removesuffix("-warmup").capitalize(),
        family=_FAMILY[warmup.model_type],
        layers=warmup.num_layers,
        hidden=warmup.hidden_size,
        name=config.run.name,
        seed=config.run.seed,
        steps=warmup.steps,
        tokens=warmup.tokens_per_step,
        drafter_steps=warmup.drafter_steps,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
