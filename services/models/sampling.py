"""From logits to the *processed* distribution, and draws from it with per-rollout random numbers.

The engine samples from `process_logits` and reports its log-probabilities; the trainer scores with the same function,
so both sides share one convention (pitfalls rows 13, 14, 49). Order: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.core.errors import RequestError
from services.core.types import COLDEST, SamplingParams


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of N rows, each [N]; `plain` says that no row filters (only temperature applies)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    plain: bool
    any_greedy: bool

    def repeat(self, times: int) -> SamplingTensors:
        """Each row `times` times in a row: parameters for [N, times, V] flattened to [N * times, V]."""
        fields = (self.temperature, self.top_k, self.top_p, self.min_p)
        return SamplingTensors(*(t.repeat_interleave(times) for t in fields), self.plain, self.any_greedy)

    def take(self, index: Tensor) -> SamplingTensors:
        """Parameters of the rows `index`."""
        fields = (self.temperature, self.top_k, self.top_p, self.min_p)
        return SamplingTensors(*(t[index] for t in fields), self.plain, self.any_greedy)


def check_sampling(p: SamplingParams) -> None:
    """Refuse what no distribution can be made of; the message names field and range."""
    bounds = (
        ("temperature", p.temperature, 0.0, 100.0), ("top_p", p.top_p, 1e-6, 1.0), ("min_p", p.min_p, 0.0, 0.999999),
        ("top_k", p.top_k, 0, 2**31), ("max_tokens", p.max_tokens, 1, 2**31),
    )  # fmt: skip
    for name, value, low, high in bounds:
        if not low <= value <= high:  # NaN fails too
            raise RequestError(f"sampling.{name} = {value} is outside [{low}, {high}]")
    if 0 < p.temperature < COLDEST:
        raise RequestError(
            f"sampling.temperature = {p.temperature} is too small to divide by: take 0, or {COLDEST:g} or more"
        )
    if "" in p.stop_strings:
        raise RequestError("sampling.stop_strings holds an empty string, which every response contains: remove it")


def sampling_tensors(params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
    """Stack the parameters of N rows."""

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingTensors(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        plain=all(p.top_k == 0 and p.top_p == 1.0 and p.min_p == 0.0 for p in params),
        any_greedy=any(p.temperature == 0 for p in params),
    )


def process_logits(logits: Tensor, s: SamplingTensors) -> Tensor:
    """float32 logits [N,V] -> logits of the processed distribution [N,V]; excluded tokens are -inf.

    Differentiable. A row with temperature 0 keeps only its (first) argmax, so mixed batches have no division by zero.
    """
    scale = s.temperature.masked_fill(s.temperature == 0, 1.0) if s.any_greedy else s.temperature
    out = logits / scale[:, None]
    if not s.plain:
        out = torch.where(_keep(out.detach(), s), out, -torch.inf)
    if s.any_greedy:
        first_best = torch.zeros_like(out, dtype=torch.bool).scatter_(-1, logits.argmax(-1, keepdim=True), True)
        out = torch.where((s.temperature > 0)[:, None] | first_best, out, -torch.inf)
    return out


def _keep(logits: Tensor, s: SamplingTensors) -> Tensor:
    """bool [N,V]: tokens surviving top-k, then top-p of what is left, then min-p relative to the best.

    Ties at the top-k edge are broken by the sort, so exactly k survive; top-p keeps the smallest prefix whose mass
    reaches p (at least one token).
    """
    vocab = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    k = torch.where(s.top_k > 0, s.top_k, torch.full_like(s.top_k, vocab))
    ordered = torch.where(rank < k[:, None], ordered, -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    # top_p 1 is off: rounding of the sum must not drop the tail, since a neighbour's filter would then change this row
    within = (before < s.top_p[:, None]) | (s.top_p >= 1.0)[:, None]
    kept = within & (ordered > -torch.inf)
    kept &= probs >= s.min_p[:, None] * probs[:, :1]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: probs [N,V] (sum 1 up to rounding), uniforms float64 [N] in [0,1) -> ids [N].

    Never returns a token of probability zero: the total is taken from the sum itself, and the last positive token
    catches rounding at the end.
    """
    cdf = probs.double().cumsum(-1)
    total = cdf[:, -1:].contiguous()
    picked = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
    last_positive = torch.searchsorted(cdf, total)
    return torch.minimum(picked, last_positive)[:, 0]


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, counters: np.ndarray, count: int) -> np.ndarray:
    """Counter-based random numbers: float64 [N,count] in [0,1) for uint64 seeds [N] and draw counters [N].

    A rollout's numbers depend on its own seed and how many it has used, never on its neighbours in the batch
    (SplitMix64's finaliser, Steele et al. 2014, applied to a seed-keyed counter).
    """
    with np.errstate(over="ignore"):  # wrap-around is the arithmetic we want
        steps = counters[:, None].astype(np.uint64) + np.arange(1, count + 1, dtype=np.uint64)
        z = _mix(_mix(seeds[:, None].astype(np.uint64) + _GAMMA) + steps * _GAMMA)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
