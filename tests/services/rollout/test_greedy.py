"""Losslessness 1: greedy output is plain decoding's, whatever drafts: any drafter, strategy, batch and family."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from services.config.naming import strategy_name
from services.config.speculation import (
    AdaptiveSelector,
    Bucket,
    BucketSelector,
    DepthSlot,
    EmaSelector,
    SpeculationConfig,
    StrategyConfig,
)
from services.core.types import FinishReason, SamplingParams
from services.speculation.selector import make_selector
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex
from tests.services.models.tiny import (
    FAMILIES,
    contrary_drafter,
    markov_model,
    perfect_drafter,
    random_drafter,
    spec_of,
    tiny_model,
)
from tests.services.rollout.engines import (
    CHAINS,
    EVERY,
    GREEDY,
    SUFFIX,
    TREES,
    Ids,
    Scripted,
    Switching,
    check_all,
    finish,
    group,
    make_engine,
    prompts,
    reference,
    strategy,
)

VOCAB = {"llama": 24, "qwen2": 40, "qwen3": 64}
DRAFTERS = {
    "flat": lambda spec: random_drafter(spec, 0.0),
    "random": lambda spec: random_drafter(spec, 1.0),
    "loud": lambda spec: random_drafter(spec, 5.0),
    "contrary": contrary_drafter,
}
NAME = lambda s: s.name if isinstance(s, DraftStrategy) else str(s)  # noqa: E731


def target(kind: str) -> PreTrainedModel:
    return tiny_model(kind, VOCAB[kind], 0, 2.0)


def ragged_work(kind: str, count: int = 6, seed: int = 0) -> list:
    """Groups of 1 to 3 on ragged prompts with ragged budgets: more than eight rows' worth."""
    return [
        group(ids, 1 + n % 3, SamplingParams(temperature=0.0, max_tokens=(16, 3, 11, 1, 7, 14)[n % 6]))
        for n, ids in enumerate(prompts(VOCAB[kind], count, seed))
    ]


@pytest.mark.parametrize("kind", FAMILIES)
def test_plain_decoding_is_transformers_own(kind: str) -> None:
    model = target(kind)
    found = finish(make_engine(model), ragged_work(kind))
    check_all(model, found)
    assert all(r.acceptance.verify_steps == 0 for r in found.values())
    paths = [reference(model, ids, 24)[0] for ids in prompts(VOCAB[kind], 6)]
    assert sum(len(set(p)) for p in paths) / len(paths) > 5, "degenerate paths would prove little"


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("s", [*CHAINS, *TREES], ids=NAME)
def test_eagle_with_any_drafter(kind: str, name: str, s: DraftStrategy) -> None:
    model = target(kind)
    engine = make_engine(model, s, DRAFTERS[name](spec_of(model)))
    found = finish(engine, ragged_work(kind, 4, seed=TREES.index(s) if s in TREES else 9))
    check_all(model, found, f"{kind} {name} {s.name}")
    assert all(r.acceptance.steps_by_strategy.keys() == {s.name} for r in found.values())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("s", [*CHAINS, *TREES], ids=NAME)
def test_a_perfect_eagle_drafter_is_always_accepted(kind: str, s: DraftStrategy) -> None:
    """The drafter's law is the target's, so each full verify step commits depth + 1 tokens along the best path."""
    model = markov_model(kind, 40, 3, 2.0)
    depth = s.shape.depth
    best_leaf = next(
        n
        for n in range(s.shape.num_nodes - 1, -1, -1)
        if all(s.shape.children[s.shape.parents[a]][0] == a for a in s.shape.ancestors(n)[1:])
    )
    straight = s.shape.depths[best_leaf]
    assert straight == depth, "the straight path is the deepest one"
    ids = (5, 9, 3)
    sampling = SamplingParams(temperature=0.0, max_tokens=3 * (depth + 1))
    found = finish(make_engine(model, s, perfect_drafter(spec_of(model))), [group(ids, 2, sampling)])
    check_all(model, found, s.name)
    for r in found.values():
        assert r.acceptance.histogram == (*[0] * depth, 3) and r.acceptance.acceptance_length == depth + 1


def scripts(kind: str, works: list) -> dict[str, Callable[[list[int], int], list[int]]]:
    """Drafters with full knowledge of the path, for better and for worse."""
    model, vocab, rng = target(kind), VOCAB[kind], random.Random(5)
    paths: dict[Ids, list[int]] = {w.prompt.token_ids: reference(model, w.prompt.token_ids, 24)[0] for w in works}

    least: dict[Ids, list[int]] = {}
    for ids, path in paths.items():
        logits = model(input_ids=torch.tensor([[*ids, *path]])).logits[0, len(ids) - 1 : -1]
        least[ids] = logits.argmin(-1).tolist()

    def follow(known: dict[Ids, list[int]], tokens: list[int], depth: int) -> list[int]:
        for ids, path in paths.items():
            said = tokens[len(ids) :]
            if tuple(tokens[: len(ids)]) == ids and path[: len(said)] == said:
                return known[ids][len(said) : len(said) + depth]
        raise AssertionError(f"{tokens} has left the greedy path")

    def ahead(tokens: list[int], depth: int) -> list[int]:
        return follow(paths, tokens, depth)

    def worst(tokens: list[int], depth: int) -> list[int]:
        return follow(least, tokens, depth)

    def partly(tokens: list[int], depth: int) -> list[int]:
        right = ahead(tokens, depth)
        keep = rng.randrange(len(right) + 1)
        return [t if i < keep else (t + 1) % vocab for i, t in enumerate(right)]

    return {
        "perfect": ahead,
        "adversarial": worst,
        "partly right": partly,
        "constant": lambda tokens, depth: [7] * depth,
        "random": lambda tokens, depth: [rng.randrange(vocab) for _ in range(rng.randrange(depth + 1))],
        "empty": lambda tokens, depth: [],
    }


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("s", SUFFIX, ids=NAME)
@pytest.mark.parametrize("script", ["perfect", "adversarial", "partly right", "constant", "random", "empty"])
def test_chains_with_scripted_drafters(kind: str, s: DraftStrategy, script: str) -> None:
    works = ragged_work(kind, 4, seed=2)
    engine = make_engine(target(kind), s, index=Scripted(scripts(kind, works)[script]))
    found = finish(engine, works)
    check_all(target(kind), found, script)
    accepted = sum(r.acceptance.num_accepted_tokens for r in found.values())
    if script == "perfect":
        assert all(
            len(r.response_ids) == sum(r.acceptance.steps_by_strategy.values()) + r.acceptance.num_accepted_tokens
            and sum(r.acceptance.steps_by_strategy.values()) == -(-len(r.response_ids) // (s.depth + 1))
            for r in found.values()
        )
    elif script == "adversarial":
        assert accepted == 0
    elif script == "empty":  # row 19: a draft of no tokens is a decode step, and counts as one
        assert all(r.acceptance.steps_by_strategy == {"off": len(r.response_ids)} for r in found.values())


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_suffix_index_that_knows_the_response_is_a_perfect_drafter(kind: str) -> None:
    model, s = target(kind), strategy("suffix", 4)
    ids = prompts(VOCAB[kind], 1, seed=8, shortest=9)[0]
    path = reference(model, ids, 24)[0]
    index = SuffixIndex(10_000, max_match=8)
    work = group(ids, 2, SamplingParams(temperature=0.0, max_tokens=20))
    for _ in range(20):  # often enough to be sure of it
        index.observe(work.prompt.id, [*ids, *path], 0)
    found = finish(make_engine(model, s, index=index), [work])
    check_all(model, found)
    for r in found.values():
        assert r.acceptance.histogram == (0, 0, 0, 0, 4)


def test_siblings_feed_each_other_while_they_run() -> None:
    """The second of two equal groups, a few rounds behind, copies what the first one says."""
    model, s = target("qwen3"), strategy("suffix", 4)
    ids = prompts(64, 1, seed=8)[0]
    engine = make_engine(model, s)
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    engine.submit([group(ids, 1, sampling, name="ahead")])
    for _ in range(10):
        engine.step()
    engine.submit([group(ids, 1, sampling, name="behind")])
    found = finish(engine)
    check_all(model, found)
    behind, ahead = found["behind#0"].acceptance, found["ahead#0"].acceptance
    assert behind.num_accepted_tokens > ahead.num_accepted_tokens
    assert (behind.acceptance_length or 0) > 2


@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch_size_with_a_switch_of_strategy_every_round(batch: int) -> None:
    kind = FAMILIES[batch % 3]
    model = target(kind)
    selector = Switching(EVERY, seed=batch)
    works = [
        group(ids, 1, SamplingParams(temperature=0.0, max_tokens=6 + (5 * n) % 13))
        for n, ids in enumerate(prompts(VOCAB[kind], 2 * batch, seed=batch, shortest=1))
    ]
    found = finish(make_engine(model, selector, random_drafter(spec_of(model)), rows=batch), works)
    check_all(model, found, batch)
    assert max(o.view.running for o in selector.recorded) == batch
    assert sum(o.tokens for o in selector.recorded) == sum(len(r.response_ids) for r in found.values())
    for o in selector.recorded:
        assert o.view.behind_tokens <= o.view.context_tokens - o.view.running and o.view.temperature == 0
        assert max(o.tried, default=0) <= o.view.running and len(o.tried) <= o.strategy.longest
        assert o.tokens == o.view.running + sum(o.accepted) - o.cut, "cut by a stop at most"
        assert all(later <= before for before, later in itertools.pairwise(o.accepted))
        assert o.seconds.total > 0 and (o.seconds.extend == 0 or not o.strategy.is_off)


ARMS = tuple(
    StrategyConfig(drafter=s.drafter, depth=s.depth, topk=s.topk, num_draft_tokens=s.num_draft_tokens)
    for s in (OFF, CHAINS[2], TREES[1], SUFFIX[0])
)


@pytest.mark.parametrize(
    "selector",
    [
        AdaptiveSelector(strategies=ARMS, check_share=0.5),
        BucketSelector(epsilon=0.3, buckets=(Bucket(strategies=ARMS), Bucket(min_running=4, strategies=ARMS[:2]))),
        EmaSelector(slots=(DepthSlot(depths=(0, 1, 3)),), warmup_rounds=0, update_interval=1),
    ],
    ids=lambda s: s.type,
)
@pytest.mark.parametrize("kind", FAMILIES)
def test_selectors_that_learn(kind: str, selector: AdaptiveSelector | BucketSelector | EmaSelector) -> None:
    model, config = target(kind), SpeculationConfig(selector=selector)
    engine = make_engine(model, make_selector(config, random.Random(1)), random_drafter(spec_of(model)))
    found = finish(engine, ragged_work(kind, 6, seed=4))
    check_all(model, found)
    used = {name for r in found.values() for name in r.acceptance.steps_by_strategy}
    assert len(used) > 1 and used <= {strategy_name(s) for s in config.strategies}


def test_without_a_drafter_nothing_is_drafted_with_it() -> None:
    config = SpeculationConfig(selector=AdaptiveSelector(strategies=ARMS))
    engine = make_engine(target("llama"), make_selector(config, random.Random(1)))
    found = finish(engine, ragged_work("llama", 3))
    assert {name for r in found.values() for name in r.acceptance.steps_by_strategy} <= {"off", SUFFIX[0].name}


def test_a_strategy_that_finds_nothing_to_draft_is_scored_all_the_same() -> None:
    """Otherwise an untried suffix arm would be chosen for ever."""
    selector = Switching(SUFFIX)
    ids = prompts(64, 1)[0]
    finish(make_engine(target("qwen3"), selector, index=Scripted(lambda t, d: [])), [group(ids)])
    assert {o.strategy.name for o in selector.recorded} <= {s.name for s in SUFFIX}


@pytest.mark.parametrize("s", EVERY, ids=NAME)
def test_a_prompt_of_one_token(s: DraftStrategy) -> None:
    model = target("llama")
    found = finish(make_engine(model, s, random_drafter(spec_of(model))), [group((3,), 2), group((4, 5, 6), 1)])
    check_all(model, found)


@pytest.mark.parametrize("s", [OFF, CHAINS[2], TREES[1]], ids=NAME)
def test_long_prompts_and_long_catch_ups(s: DraftStrategy) -> None:
    """Longer than a prefill chunk of the target and several catch-up chunks of the drafter, beside a short one."""
    model = tiny_model("qwen3", 64, 0, 2.0, max_position_embeddings=1024)
    long = tuple(random.Random(1).randrange(64) for _ in range(700))
    engine = make_engine(model, s, random_drafter(spec_of(model)), max_len=720, rows=3)
    found = finish(engine, [group((1, 2, 3), 1), group(long, 2, SamplingParams(temperature=0.0, max_tokens=6))])
    check_all(model, found)


def test_greedy_has_logprob_zero_and_length_as_the_reason() -> None:
    found = finish(make_engine(target("qwen2")), [group((1, 2, 3), 2)])
    for r in found.values():
        assert r.finish_reason is FinishReason.LENGTH and len(r.response_ids) == GREEDY.max_tokens
        assert r.rollout_logprobs == (0.0,) * GREEDY.max_tokens
