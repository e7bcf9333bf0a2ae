"""The model card that `longtail warmup` writes beside the weights: how they were made, what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.config.schema import ClusterConfig


@dataclass(frozen=True)
class WarmupResult:
    """What the model card states. Lengths are response tokens at temperature 1."""

    parameters: int
    drafter_parameters: int
    heldout_pass_rate: float
    heldout_pass_rate_greedy: float
    heldout_prompts: int
    response_len_p50: float
    response_len_p99: float
    response_len_max: int
    drafter_acceptance_length: float
    target_seconds: float
    drafter_seconds: float
    device: str


_CARD = """# Pocket model

A Qwen3-shaped causal language model of {parameters:,} parameters ({layers} layers, hidden size {hidden}) with one token
per character, and a one-layer EAGLE drafter for it ({drafter_parameters:,} parameters). It adds up short chains of
one- and two-digit numbers in writing, and is only half good at it: something for reinforcement learning to improve on
a laptop. It is of no other use.

Made by `longtail warmup {name}` (seed {seed}; the resolved configuration is in `warmup.yaml`): {steps} supervised steps
of about {tokens:,} tokens on worked traces of generated problems, then {drafter_steps} drafter steps on the model's own
responses. Same seed, same machine, same library versions: same weights. The prompts below share no hash with training.

| measured on {heldout_prompts} held-out problems | |
|---|---|
| pass rate at temperature 1 | {heldout_pass_rate:.3f} |
| pass rate, greedy | {heldout_pass_rate_greedy:.3f} |
| response length, median / 99th percentile / longest | {response_len_p50:.0f} / {response_len_p99:.0f} / \
{response_len_max} tokens |
| drafter's acceptance length, chain of {unroll}, temperature 1, offline | {drafter_acceptance_length:.2f} |
| time for target / drafter | {target_seconds:.0f} s / {drafter_seconds:.0f} s on {device} |

Training data: none but generated sums (reasoning-gym's `chain_sum`). Licence: Apache-2.0, as the rest of Longtail.
"""


def write_card(folder: Path, result: WarmupResult, config: ClusterConfig) -> None:
    """Write `folder`/README.md."""
    warmup = config.warmup
    text = _CARD.format(
        **{name: getattr(result, name) for name in result.__dataclass_fields__},
        layers=warmup.num_layers,
        hidden=warmup.hidden_size,
        name=config.run.name,
        seed=config.run.seed,
        steps=warmup.steps,
        tokens=warmup.tokens_per_step,
        drafter_steps=warmup.drafter_steps,
        unroll=config.drafter.unroll,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
