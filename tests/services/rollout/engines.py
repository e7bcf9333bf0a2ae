"""Engines on tiny models, work for them, and what plain decoding would answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.config.speculation import StrategyConfig
from services.core.types import GroupWork, Prompt, Rollout, SamplingParams
from services.models.target import TargetModel
from services.rollout.eagle import EagleDrafting
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.drafting import Draft
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.selector import Fixed, Selector
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy
from services.speculation.suffix_index import Follower, SuffixIndex
from tests.services.models.tiny import CPU, greedy_path, spec_of, tensors_of

Ids = tuple[int, ...]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def strategy(
    drafter: str,
    depth: int,
    topk: int = 1,
    nodes: int | None = None,
    sampled: bool = True,
    budget: int | None = None,
) -> DraftStrategy:
    nodes = depth + 1 if nodes is None else nodes
    return draft_strategy(
        StrategyConfig(
            drafter=drafter,  # type: ignore[arg-type]
            depth=depth,
            topk=topk,
            num_draft_tokens=nodes,
            sampled=sampled,
            budget=budget,
        )
    )


CHAINS = [strategy("eagle", d, sampled=s) for d, s in ((1, True), (1, False), (3, True), (4, False))]
TREES = [
    strategy("eagle", 1, 3, 4),
    strategy("eagle", 2, 2, 7),
    strategy("eagle", 3, 2, 6, sampled=False),
    strategy("eagle", 3, 4, 12),
]
SUFFIX = [strategy("suffix", 2), strategy("suffix", 6)]
HYBRID = [strategy("hybrid", 2, nodes=6), strategy("hybrid", 1, nodes=8, sampled=False), strategy("hybrid", 3)]
SHARED = [strategy("eagle", 5, budget=2), strategy("hybrid", 4, nodes=7, budget=1)]
EVERY = [OFF, *CHAINS, *TREES, *SUFFIX, *HYBRID, *SHARED]


class Switching:
    """A selector that draws another strategy at random every round."""

    def __init__(self, strategies: Sequence[DraftStrategy], seed: int = 0) -> None:
        self._strategies, self._rng = list(strategies), random.Random(seed)
        self.recorded: list[RoundOutcome] = []

    def choose(self, view: RoundView) -> Choice:
        return Choice(self._rng.choice(self._strategies), "at random")

    def record(self, outcome: RoundOutcome) -> None:
        self.recorded.append(outcome)


class Scripted(SuffixIndex):
    """A drafter of our own behind the suffix strategies: `script(prompt + response so far, depth)` proposes."""

    def __init__(self, script: Callable[[list[int], int], list[int]]) -> None:
        super().__init__(1_000_000, 1, 400)  # a context this long is the whole sequence
        self._script = script

    def observe(self, key: str, tokens: Sequence[int], start: int) -> None:
        """Knows nothing by itself."""

    def propose(
        self, key: str, tokens: Sequence[int], most: int, least: float = 0.0, reach: float = 1.0
    ) -> list[Follower]:
        return [Follower(token, 1.0) for token in self._script(list(tokens), most)]


def draft_now(engine: NativeEngine, s: DraftStrategy, eagle: EagleDrafting | None = None) -> Draft:
    """What the EAGLE drafter proposes for all rows of the engine, caught up as far as it goes."""
    eagle = eagle or engine._proposer.eagle
    eagle.feed(eagle.missing().tolist())
    caught = eagle.catch_up()
    assert all(caught.ready)
    lengths = [s.shape.num_nodes - 1] * len(caught.ready)
    return eagle.propose(s.shape, s.sampled, caught.hidden, lengths, engine._row_sampling(), engine._uniforms)


def letters(ids: Iterable[int]) -> str:
    return "".join(chr(97 + i) for i in ids)


def ticking() -> Callable[[], float]:
    """A clock that advances a millisecond with every look."""
    ticks = itertools.count()
    return lambda: next(ticks) / 1000


def make_engine(
    model: PreTrainedModel,
    selector: Selector | DraftStrategy = OFF,
    drafter: dict[str, Tensor] | None = None,
    index: SuffixIndex | None = None,
    rows: int = 8,
    max_len: int = 64,
    decode=letters,
    threshold: float = 1.0,
    load: bool = True,
    engine_class: type[NativeEngine] = NativeEngine,
    target_class: type[TargetModel] = TargetModel,
    capture_bytes: int = 0,
) -> NativeEngine:
    options = EngineOptions(rows, max_len, 16, threshold, index or SuffixIndex(100_000), capture_bytes=capture_bytes)
    target = target_class(spec_of(model), max_len + options.spare_columns, CPU, model.dtype)
    chosen = Fixed(selector) if isinstance(selector, DraftStrategy) else selector
    engine = engine_class(target, options, chosen, decode, ticking())
    if load:
        engine.load_policy(0, tensors_of(model))
    if drafter is not None:
        engine.load_drafter(0, drafter)
    return engine


def group(
    ids: Ids, count: int = 1, sampling: SamplingParams = GREEDY, first_seed: int = 0, name: str | None = None
) -> GroupWork:
    key = "-".join(map(str, ids))
    prompt = Prompt(f"p{key}", letters(ids), ids, "", "test")
    numbers = tuple(range(count))
    return GroupWork(name or f"g{key}/{first_seed}", prompt, numbers, tuple(first_seed + i for i in numbers), sampling)


def finish(engine: NativeEngine, works: Sequence[GroupWork] = (), limit: int = 2000) -> dict[str, Rollout]:
    """Submit, run until nothing is left, and check that every rollout came exactly once."""
    engine.submit(works)
    found: dict[str, Rollout] = {}
    for _ in range(limit):
        if not (engine.num_running or engine.num_waiting):
            break
        for rollout in engine.step():
            assert rollout.rollout_id not in found
            found[rollout.rollout_id] = rollout
    assert not engine.num_running and not engine.num_waiting, "the engine does not come to an end"
    expected = {f"{w.group_id}#{i}" for w in works for i in w.indices}
    assert not works or found.keys() == expected
    return found


def prompts(vocab: int, count: int, seed: int = 0, shortest: int = 2) -> list[Ids]:
    """Ragged prompts."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(vocab) for _ in range(shortest + rng.randrange(14))) for _ in range(count)]


@lru_cache(maxsize=4096)
def reference(model: PreTrainedModel, ids: Ids, count: int) -> tuple[list[int], list[float]]:
    return greedy_path(model, ids, count)


@torch.no_grad()
def lost_logits(model: PreTrainedModel, ids: Ids, response: Sequence[int]) -> list[float]:
    """By how much each token's logit falls short of the best one's, given all tokens before it: zeros, if the response
    is what plain decoding by transformers says."""
    logits = model(input_ids=torch.tensor([[*ids, *response]]), use_cache=False).logits[0, len(ids) - 1 : -1]
    return (logits.max(-1).values - logits.gather(-1, torch.tensor(response)[:, None])[:, 0]).tolist()


def check_greedy(model: PreTrainedModel, ids: Ids, response: Sequence[int], label: object = "") -> None:
    """Every token is the argmax after all tokens before it: identical to plain decoding, by induction. Another token
    counts as rounding only where the two logits are closer than 1e-4."""
    lost = lost_logits(model, ids, response) if response else []
    wrong = {n: gap for n, gap in enumerate(lost) if gap > 1e-4}
    assert not wrong, f"{label}: {list(response)} after {ids} is not plain decoding; logits lost by token: {wrong}"


def check_all(model: PreTrainedModel, rollouts: dict[str, Rollout], label: object = "") -> None:
    assert rollouts
    for r in rollouts.values():
        check_greedy(model, r.prompt_ids, r.response_ids, f"{label} {r.rollout_id}")
        assert all(x == 0.0 for x in r.rollout_logprobs)
