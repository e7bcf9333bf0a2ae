from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from services.core.errors import RequestError
from services.core.types import COLDEST, SamplingParams
from services.models.sampling import check_sampling, draw, process_logits, sampling_tensors, uniforms
from tests.services.models.tiny import CPU


def reference(logits: list[float], p: SamplingParams) -> list[float]:
    """The processed distribution in plain Python: temperature, then top-k, then top-p, then min-p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if p.temperature == 0:
        return [float(i == order[0]) for i in range(len(logits))]
    kept = order[: p.top_k] if p.top_k else order
    high = logits[order[0]]
    weight = {i: math.exp((logits[i] - high) / p.temperature) for i in kept}
    total, before, nucleus = sum(weight.values()), 0.0, []
    for i in kept:
        if (before < p.top_p or p.top_p == 1.0) and weight[i] >= p.min_p * weight[order[0]]:
            nucleus.append(i)
        before += weight[i] / total
    mass = sum(weight[i] for i in nucleus)
    return [weight[i] / mass if i in nucleus else 0.0 for i in range(len(logits))]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.91, 0.5, 0.07]),
    min_p=st.sampled_from([0.0, 0.1, 0.35, 0.9]),
)
LOGITS = st.lists(st.floats(-8, 8, allow_nan=False), min_size=7, max_size=7, unique=True)


@given(st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=5))
def test_processed_distribution_of_mixed_batches(rows: list[tuple[list[float], SamplingParams]]) -> None:
    """Rows 13, 14 and 15: every filter on every row, greedy rows beside sampled ones, no NaN."""
    logits = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    probs = process_logits(logits, sampling_tensors([p for _, p in rows], CPU)).softmax(-1)
    for got, (row, p) in zip(probs, rows, strict=True):
        expected = torch.tensor(reference(row, p), dtype=torch.float64)
        edges = near_edge(row, p)
        assert torch.isfinite(got).all()
        assert edges or (got - expected).abs().max() < 1e-6


def near_edge(logits: list[float], p: SamplingParams) -> bool:
    """A filter's edge lies within rounding of a token: either side is right."""
    weights = sorted((math.exp((x - max(logits)) / (p.temperature or 1)) for x in logits), reverse=True)
    kept = weights[: p.top_k or None]
    sums = np.cumsum(kept) / sum(kept)
    return bool((abs(sums - p.top_p) < 1e-5).any() and p.top_p < 1) or any(abs(w - p.min_p) < 1e-5 for w in kept)


def test_row_15_greedy_row_in_a_mixed_batch_is_the_exact_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [0.0, 1.0, 2.0, 3.0]])
    s = sampling_tensors([SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)], CPU)
    probs = process_logits(logits, s).softmax(-1)
    assert probs[0].tolist() == [0.0, 1.0, 0.0, 0.0]  # the first of two equal ones
    assert torch.allclose(probs[1], logits[1].softmax(-1))
    assert process_logits(logits, s).log_softmax(-1)[0, 1] == 0.0


def test_a_row_without_filters_is_the_same_beside_a_filtered_one() -> None:
    """The tail of a peaked distribution has less mass than float32 can add to 1: top_p 1 must still keep it."""
    logits = torch.tensor([[0.0, -19.0, -19.0, -30.0]]).repeat(2, 1)
    alone = process_logits(logits[:1], sampling_tensors([SamplingParams()], CPU))
    mixed = process_logits(logits, sampling_tensors([SamplingParams(), SamplingParams(top_p=0.5)], CPU))
    assert torch.equal(mixed[0], alone[0]) and torch.isfinite(mixed[0]).all()


def test_ties_at_the_top_k_edge_keep_exactly_k() -> None:
    probs = process_logits(torch.zeros(1, 6), sampling_tensors([SamplingParams(top_k=2)], CPU)).softmax(-1)
    assert (probs > 0).sum() == 2


def test_processing_is_differentiable() -> None:
    """The trainer scores through it: excluded tokens take no gradient and make no NaN."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    params = [SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(min_p=0.2), SamplingParams(top_k=2)]
    process_logits(logits, sampling_tensors(params, CPU)).log_softmax(-1).max(-1).values.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all() and logits.grad.abs().sum() > 0


def test_repeat_keeps_rows_together() -> None:
    s = sampling_tensors([SamplingParams(top_k=1), SamplingParams(top_k=3, temperature=0.0)], CPU).repeat(3)
    assert s.top_k.tolist() == [1, 1, 1, 3, 3, 3] and s.any_greedy and not s.plain
    assert s.temperature.tolist() == [1, 1, 1, 0, 0, 0]


WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1.0), st.floats(0.1, 1.0)), min_size=1, max_size=9).filter(
    lambda w: sum(w) > 1e-6
)
UNIFORM = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 5e-324, 1 - 2**-53, 0.5]))


@given(WEIGHTS, UNIFORM, st.sampled_from([torch.float32, torch.float64]))
def test_draw_never_returns_a_token_of_probability_zero(weights: list[float], u: float, dtype: torch.dtype) -> None:
    probs = torch.tensor([weights], dtype=dtype)
    probs = probs / probs.sum()
    token = int(draw(probs, torch.tensor([u], dtype=torch.float64)))
    assert 0 <= token < len(weights) and probs[0, token] > 0


@given(WEIGHTS, UNIFORM)
def test_draw_is_the_inverse_of_the_cumulative_sum(weights: list[float], u: float) -> None:
    probs = torch.tensor([weights], dtype=torch.float64)
    token = int(draw(probs, torch.tensor([u], dtype=torch.float64)))
    below, upto = sum(weights[:token]) / sum(weights), sum(weights[: token + 1]) / sum(weights)
    assert below - 1e-12 <= u <= upto + 1e-12


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 0.0), ("top_p", 1.1),
        ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.0), ("min_p", math.nan), ("top_k", -1), ("max_tokens", 0),
        ("max_tokens", -5), ("temperature", 1e-142), ("temperature", 9e-6),
    ],
)  # fmt: skip
def test_impossible_parameters_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"sampling.{field} = "):
        check_sampling(SamplingParams(**{field: value}))  # type: ignore[arg-type]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty string"):
        check_sampling(SamplingParams(stop_strings=("x", "")))


@pytest.mark.parametrize("temperature", [COLDEST, 0.1, 100.0])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_every_temperature_that_passes_makes_a_distribution(temperature: float, scale: float) -> None:
    """A token that is no token ends the engine, and with it the model server."""
    params = SamplingParams(temperature, top_k=499)
    check_sampling(params)
    logits = scale * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    probs = process_logits(logits, sampling_tensors([params] * 4, torch.device("cpu"))).softmax(-1)
    assert torch.allclose(probs.sum(-1), torch.ones(4))
    for u in (0.0, 0.5, 1 - 2**-53):
        ids = draw(probs, torch.full((4,), u, dtype=torch.float64))
        assert (probs.gather(1, ids[:, None]) > 0).all()


def test_usual_parameters_pass() -> None:
    check_sampling(SamplingParams())
    check_sampling(SamplingParams(0.0, 5, 1e-6, 0.999, 1, (2,), ("\n",)))


def numbers(seeds: int, draws: int, count: int = 1) -> np.ndarray:
    """[seeds, draws * count]: the stream of each seed, `count` at a time."""
    columns = [
        uniforms(np.arange(seeds, dtype=np.uint64), np.full(seeds, d * count, np.uint64), count) for d in range(draws)
    ]
    return np.concatenate(columns, axis=1)


def test_uniforms_are_uniform() -> None:
    u = numbers(500, 200)
    assert u.dtype == np.float64 and (u >= 0).all() and (u < 1).all()
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-4
    # over seeds at one counter, and over counters of one seed: neither direction may be worse than the other
    assert min(stats.kstest(u[:, d], "uniform").pvalue for d in range(0, 200, 20)) > 1e-5
    assert min(stats.kstest(u[s], "uniform").pvalue for s in range(0, 500, 50)) > 1e-5


@pytest.mark.parametrize("lag", [1, 2, 3, 7])
def test_uniforms_of_nearby_counters_and_seeds_do_not_depend_on_each_other(lag: int) -> None:
    """Accept draws, residual draws and draft draws use neighbouring counters; groups use neighbouring seeds."""
    u = numbers(500, 200)
    for first, second in ((u[:, :-lag], u[:, lag:]), (u[:-lag], u[lag:])):
        cells, _, _ = np.histogram2d(first.ravel(), second.ravel(), bins=12, range=[[0, 1], [0, 1]])
        assert stats.chisquare(cells.ravel()).pvalue > 1e-4
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 5 / math.sqrt(first.size)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 9))
def test_uniforms_are_a_stream_however_it_is_cut(seed: int, counter: int, first: int, second: int) -> None:
    seeds = np.array([seed], np.uint64)

    def at(c: int, n: int) -> list[float]:
        return uniforms(seeds, np.array([c], np.uint64), n)[0].tolist()

    assert at(counter, first) + at(counter + first, second) == at(counter, first + second)
    both = uniforms(np.array([seed ^ 1, seed], np.uint64), np.array([5, counter], np.uint64), first)
    assert both[1].tolist() == at(counter, first)
