"""Costs of models that were not measured, from those of one that was, by rules that are written here.

Measured: rounds of a 7B shape on one H100 (deploy/costs/h100-7b.json), at one context length. All else are rules:

- reading keys and values: their bytes over BANDWIDTH, per context token and pass; the measured points are freed of it
  first, so that no other term stands in for it;
- another target: its pass and its arithmetic by parameters per GPU; on several GPUs EFFICIENCY of that, and two
  all-reduces a layer; its drafter, which is one layer and the LM head, alike;
- a micro-step of the drafter's training: by the drafter's parameters, from 585 ms of 86.5 million (measured, H200);
- publishing and loading a policy: by bytes per GPU, from 3.3 s of 15.2 GB (measured, H200);
- training the policy: 6 floating-point operations per parameter and token, OVERHEAD times that for reading, log
  probabilities and the optimizer; prefill: 2 of them; at UTILISATION of the card's peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.simulator.scenario import Seconds
from services.speculation.cost_table import CostPoint, CostTable, quantities

BANDWIDTH = 0.7 * 3.35e12  # bytes per second of an H100's memory, of which passes were measured to reach this part
PEAK, UTILISATION = 989e12, 0.4  # dense bfloat16 operations per second of an H100
EFFICIENCY, ALL_REDUCE_S, OVERHEAD = 0.85, 12e-6, 1.3
MICRO_STEP_S, MICRO_STEP_PARAMETERS = 0.585, 86.5e6
LOAD_S, LOAD_BYTES = 3.3, 15.2e9


@dataclass(frozen=True, slots=True)
class Shape:
    """`kv_bytes`: keys and values of a token in all layers, bfloat16. `gpus`: that a server takes."""

    name: str
    parameters: float
    layers: int
    kv_bytes: float
    drafter_parameters: float
    gpus: int = 1

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of a server."""
        return PEAK * UTILISATION * self.gpus / (2 * self.parameters)

    def seconds(self, base: Seconds) -> Seconds:
        per_gpu = 1 / self.gpus
        load_s = LOAD_S * 2 * self.parameters / LOAD_BYTES * per_gpu
        micro_step_s = MICRO_STEP_S * self.drafter_parameters / MICRO_STEP_PARAMETERS * per_gpu
        policy_s = OVERHEAD * 6 * self.parameters / (PEAK * UTILISATION)
        return replace(base, policy_token=policy_s, publish=load_s / 2, load=load_s / 2, micro_step=micro_step_s)


SHAPES = {
    s.name: s
    for s in (
        Shape("7b", 7.6e9, 28, 2 * 28 * 4 * 128 * 2, 0.26e9),
        Shape("32b", 32.5e9, 64, 2 * 64 * 8 * 128 * 2, 0.55e9, gpus=4),
        Shape("70b", 70e9, 80, 2 * 80 * 8 * 128 * 2, 0.9e9, gpus=8),
    )
}
MEASURED = SHAPES["7b"]


def costs_of(shape: Shape, measured: Sequence[CostPoint]) -> CostTable:
    """`measured`: rounds of MEASURED on one GPU."""
    table = CostTable.fit([_without_reading(point) for point in measured])
    terms = {name: value * _factor(name, shape) for name, value in table.terms.items()}
    if shape.gpus > 1:
        terms["verify/pass"] += 2 * shape.layers * ALL_REDUCE_S
    return CostTable(terms | _reading(shape), table.knots, table.spread)


def _reading(shape: Shape) -> dict[str, float]:
    """Seconds per context token of a pass of the target, and of one of the drafter, which has one layer."""
    target = shape.kv_bytes / BANDWIDTH / shape.gpus
    return {"verify/read": target, "extend/read": target / shape.layers, "draft/read": target / shape.layers}


def _without_reading(point: CostPoint) -> CostPoint:
    view, reading = point.view, _reading(MEASURED)
    amounts = quantities(point.strategy, view.running, view.context_tokens, view.behind_tokens, (0.0,))
    seconds = point.total - sum(amounts.get(name, 0.0) * value for name, value in reading.items())
    return CostPoint(point.strategy, replace(view, context_tokens=view.behind_tokens, behind_tokens=0), seconds)


def _factor(name: str, shape: Shape) -> float:
    stage = name.partition("/")[0]
    if stage == "rest":
        return 1.0
    by = shape.parameters / MEASURED.parameters
    if stage in ("draft", "extend"):
        by = shape.drafter_parameters / MEASURED.drafter_parameters
    return by / shape.gpus / (EFFICIENCY if shape.gpus > 1 else 1.0)
