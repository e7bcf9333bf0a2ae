"""Losslessness 3 and 5 over the whole engine: laws by chi-square, logprobs against transformers, seeds."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

import pytest
import torch
from scipy import stats
from transformers import PreTrainedModel

from services.core.types import Rollout, SamplingParams
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex
from tests.services.models.test_sampling import reference
from tests.services.models.tiny import FAMILIES, random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import (
    CHAINS,
    EVERY,
    SUFFIX,
    TREES,
    Ids,
    Scripted,
    Switching,
    finish,
    group,
    make_engine,
    prompts,
)

SMALL = 6
STOP = 4
PROMPT = (1, 5, 2)
PLAIN = SamplingParams(max_tokens=3, stop_token_ids=(STOP,))
FILTERED = SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.02, max_tokens=3, stop_token_ids=(STOP,))


@lru_cache(maxsize=8)
def exact_law(model: PreTrainedModel, p: SamplingParams) -> dict[Ids, float]:
    """Probability of every response, from transformers' logits and the distribution made by hand."""
    law: dict[Ids, float] = {}
    open_ = {(): 1.0}
    for step in range(p.max_tokens):
        following: dict[Ids, float] = {}
        for said, w in open_.items():
            logits = model(input_ids=torch.tensor([[*PROMPT, *said]])).logits[0, -1]
            for token, share in enumerate(reference(logits.tolist(), p)):
                if share:
                    ended = token in p.stop_token_ids or step + 1 == p.max_tokens
                    (law if ended else following)[(*said, token)] = w * share
        open_ = following
    return law


def p_value(counts: Counter[Ids], law: dict[Ids, float]) -> float:
    """Chi-square of observed responses, those expected fewer than 5 times pooled."""
    total = counts.total()
    assert counts.keys() <= law.keys(), f"impossible responses: {counts.keys() - law.keys()}"
    large = [s for s, w in law.items() if w * total >= 5]
    expected = [law[s] * total for s in large]
    observed = [float(counts[s]) for s in large]
    if (rest := total - sum(expected)) > 1:
        expected.append(rest)
        observed.append(total - sum(observed))
    scale = total / sum(expected)
    return float(stats.chisquare(observed, [e * scale for e in expected]).pvalue)


def sample(selector, p: SamplingParams, count: int = 2048, threshold: float = 1.0, index=None, scale: float = 1.0):
    model = tiny_model("qwen3", SMALL, 4, 0.6)
    engine = make_engine(
        model, selector, random_drafter(spec_of(model), scale), rows=256, max_len=16, threshold=threshold, index=index
    )
    # the same prompt every time, so that the suffix index knows much; seeds next to each other, as groups have
    works = [group(PROMPT, 64, p, first_seed=64 * n, name=f"w{n}") for n in range(count // 64)]
    found = finish(engine, works)
    return model, found, Counter(r.response_ids for r in found.values())


@pytest.mark.parametrize("p", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("s", [*EVERY, "switching"], ids=lambda s: getattr(s, "name", s))
def test_responses_have_the_targets_law(s: DraftStrategy | str, p: SamplingParams) -> None:
    selector = Switching(EVERY, seed=3) if isinstance(s, str) else s
    model, found, counts = sample(selector, p)
    assert p_value(counts, exact_law(model, p)) > 1e-4
    if selector is not OFF:
        accepted = sum(r.acceptance.num_accepted_tokens for r in found.values())
        assert accepted > 100, "hardly a draft was accepted: the test shows nothing"


def test_the_chi_square_catches_a_lossy_engine() -> None:
    model, _, counts = sample(CHAINS[2], PLAIN, threshold=0.15)
    assert p_value(counts, exact_law(model, PLAIN)) < 1e-6


def test_a_drafter_that_depends_on_what_was_said_changes_nothing() -> None:
    """Ragged drafts whose length and tokens follow the response so far: fixed before the draw, so still lossless."""
    index = Scripted(lambda tokens, depth: [(tokens[-1] + 1) % SMALL] * ((tokens[-1] * 7 + len(tokens)) % (depth + 1)))
    model, _, counts = sample(SUFFIX[1], PLAIN, index=index)
    assert p_value(counts, exact_law(model, PLAIN)) > 1e-4


# -- logprobs


def score(model: PreTrainedModel, r: Rollout, p: SamplingParams, start: int = 0, end: int | None = None) -> list[float]:
    """Teacher-forced: one pass of transformers over prompt and response, processed by hand."""
    logits = model(input_ids=torch.tensor([[*r.prompt_ids, *r.response_ids]])).logits[0].double()
    end = len(r.response_ids) if end is None else end
    first = len(r.prompt_ids) - 1
    return [
        math.log(max(reference(logits[first + t].tolist(), p)[r.response_ids[t]], 1e-300)) for t in range(start, end)
    ]


LOGPROB_CASES = {
    "plain": SamplingParams(max_tokens=14),
    "temperature": SamplingParams(temperature=0.7, max_tokens=14),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9, max_tokens=14),
    "top_k": SamplingParams(top_k=5, max_tokens=14),
    "min_p": SamplingParams(temperature=1.4, min_p=0.1, max_tokens=14),
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("s", [OFF, CHAINS[2], CHAINS[3], TREES[1], TREES[2], SUFFIX[1]], ids=lambda s: s.name)
def test_rows_10_and_49_one_logprob_per_token_equal_to_transformers(kind: str, s: DraftStrategy) -> None:
    """All conventions in one mixed batch: row 13 too, a row's own parameters decide."""
    model = tiny_model(kind, 32, 5, 1.0)
    works = [
        group(ids, 2, p, first_seed=31 * n)
        for n, (ids, p) in enumerate(zip(prompts(32, 5, seed=2), LOGPROB_CASES.values(), strict=True))
    ]
    found = finish(make_engine(model, s, random_drafter(spec_of(model)), rows=10), works)
    for r in found.values():
        assert len(r.rollout_logprobs) == len(r.response_ids) == 14 and r.logprob_convention == "processed"
        again = score(model, r, r.sampling)
        assert max(abs(a - b) for a, b in zip(again, r.rollout_logprobs, strict=True)) < 1e-4, (s.name, r.sampling)


@pytest.mark.parametrize("s", [OFF, CHAINS[2], TREES[1]], ids=lambda s: s.name)
def test_logprobs_before_and_after_a_policy_load(s: DraftStrategy) -> None:
    """Each token is scored by the version that drew it."""
    old, new = tiny_model("qwen2", 32, 5), tiny_model("qwen2", 32, 6)
    engine = make_engine(old, s, random_drafter(spec_of(old)))
    work = group((3, 1, 4), 4, SamplingParams(temperature=0.8, max_tokens=14))
    engine.submit([work])
    for _ in range(3):
        engine.step()
    known = {r.rollout_id: r.num_tokens for r in engine.running()}
    assert known and all(0 < n < 14 for n in known.values())
    engine.load_policy(5, tensors_of(new))
    for r in finish(engine).values():
        cut = known[r.rollout_id]
        again = score(old, r, r.sampling, 0, cut) + score(new, r, r.sampling, cut)
        assert max(abs(a - b) for a, b in zip(again, r.rollout_logprobs, strict=True)) < 1e-4
        assert r.policy_versions == (0, 5)


# -- seeds


def answers(works, **options) -> dict[str, Rollout]:
    return finish(make_engine(tiny_model("llama", 32, 5), OFF, **options), works)


def test_the_same_seed_gives_the_same_rollout_whatever_the_neighbours() -> None:
    cases = list(LOGPROB_CASES.values())
    work = [group(ids, 3, cases[n], first_seed=100 * n) for n, ids in enumerate(prompts(32, 5, seed=4))]
    together = answers(work, rows=16)
    assert {k: r.response_ids for k, r in answers(work[::-1], rows=3).items()} == {
        k: r.response_ids for k, r in together.items()
    }
    for w in work:
        for key, r in answers([w], rows=3).items():
            assert r.response_ids == together[key].response_ids
            assert r.rollout_logprobs == pytest.approx(together[key].rollout_logprobs, abs=1e-5)


def test_seeds_stay_with_their_rollouts_when_rows_move() -> None:
    """Ragged lengths: rows end one by one, and the last row moves into each gap with the stream it has used so far."""
    budgets = (2, 14, 5, 12, 1, 9, 14, 3)
    work = [
        group(ids, 1, SamplingParams(max_tokens=budget), first_seed=40 * n, name=f"g{n}")
        for n, (ids, budget) in enumerate(zip(prompts(32, 8, seed=6), budgets, strict=True))
    ]
    together = answers(work, rows=8)
    for w in work:
        (alone,) = answers([w], rows=1).values()
        assert alone.response_ids == together[alone.rollout_id].response_ids
        assert len(alone.response_ids) == w.sampling.max_tokens


def test_different_seeds_differ_and_any_integer_is_a_seed() -> None:
    p = SamplingParams(max_tokens=12)
    wrapped = group((1, 2), 8, p, first_seed=2**64 - 4, name="wrapped")
    found = answers([group((1, 2), 8, p, first_seed=-4), wrapped], rows=16)
    by_seed = {r.seed: r.response_ids for r in found.values()}
    assert len(set(by_seed.values())) >= 8
    assert all(by_seed[seed] == by_seed[seed % 2**64] for seed in (-4, -3, -2, -1))


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    """Row 15 in the engine: a greedy row stays exact, a sampled one keeps its own stream."""
    ids = prompts(32, 3, seed=4)
    sampled = [group(i, 2, SamplingParams(max_tokens=10), first_seed=7) for i in ids]
    greedy = [group(i, 1, SamplingParams(temperature=0.0, max_tokens=10), name=f"greedy{n}") for n, i in enumerate(ids)]
    mixed = answers([*sampled, *greedy], rows=9)
    for key, r in (answers(sampled) | answers(greedy)).items():
        assert mixed[key].response_ids == r.response_ids
    for s in (CHAINS[2], TREES[1]):
        model = tiny_model("llama", 32, 5)
        found = finish(make_engine(model, s, random_drafter(spec_of(model)), rows=9), [*sampled, *greedy])
        for key in (w.group_id + "#0" for w in greedy):
            assert found[key].response_ids == mixed[key].response_ids
            assert found[key].rollout_logprobs == (0.0,) * 10
        assert all(math.isfinite(x) for r in found.values() for x in r.rollout_logprobs)


def test_earlier_epochs_of_a_prompt_feed_the_suffix_drafter() -> None:
    """The index outlives the requests, and what it changes is speed only."""
    model, index = tiny_model("qwen3", SMALL, 4, 3.0), SuffixIndex(10_000)
    p = SamplingParams(max_tokens=20)
    engine = make_engine(model, SUFFIX[0], index=index)
    first = finish(engine, [group(PROMPT, 4, p, first_seed=0)])
    known = index.num_tokens
    second = finish(engine, [group(PROMPT, 4, p, first_seed=50)])
    assert index.num_tokens > known > 0
    speed = [sum(r.acceptance.num_accepted_tokens for r in f.values()) for f in (first, second)]
    assert speed[1] > speed[0]
