"""Weights between rounds: loads mid-response, refused loads, and what each kind of load must not touch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.core.errors import WeightError
from services.core.types import SamplingParams, ServedVersions
from services.models.eagle import EagleNetwork
from services.rollout.eagle import EagleDrafting
from services.rollout.native import NativeEngine
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.models.test_target import bad_loads
from tests.services.models.tiny import (
    FAMILIES,
    contrary_drafter,
    random_drafter,
    spec_of,
    tensors_of,
    tiny_model,
)
from tests.services.rollout.engines import (
    CHAINS,
    EVERY,
    SUFFIX,
    TREES,
    Switching,
    check_all,
    check_greedy,
    finish,
    group,
    lost_logits,
    make_engine,
    prompts,
)

VOCAB = 32
BUDGET = SamplingParams(temperature=0.0, max_tokens=20)
KINDS = [OFF, CHAINS[2], TREES[1], SUFFIX[0], "switching"]


def model_of(kind: str, seed: int = 0):
    return tiny_model(kind, VOCAB, seed, 2.0)


def running_engine(kind: str, s: DraftStrategy | str, rounds: int = 3) -> NativeEngine:
    model = model_of(kind)
    selector = Switching(EVERY, seed=1) if isinstance(s, str) else s
    engine = make_engine(model, selector, random_drafter(spec_of(model)))
    engine.submit([group(ids, 2, BUDGET) for ids in prompts(VOCAB, 4, seed=3)])
    for _ in range(rounds):
        assert not engine.step()
    return engine


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("s", KINDS, ids=lambda s: getattr(s, "name", s))
def test_a_policy_load_mid_response_goes_on_under_the_new_weights(kind: str, s: DraftStrategy | str) -> None:
    """Each part of the response is plain decoding of the version that served it."""
    old, new = model_of(kind), model_of(kind, 1)
    engine = running_engine(kind, s)
    known = {r.rollout_id: r.num_tokens for r in engine.running()}
    engine.load_policy(3, tensors_of(new))
    assert engine.versions == ServedVersions(3, 0)
    differ = 0
    for key, r in finish(engine).items():
        cut = known[key]
        check_greedy(old, r.prompt_ids, r.response_ids[:cut])
        check_greedy(new, (*r.prompt_ids, *r.response_ids[:cut]), r.response_ids[cut:], key)
        assert r.policy_versions == (0, 3) and r.drafter_versions == (0,) and len(r.response_ids) == 20
        differ += max(lost_logits(old, r.prompt_ids, r.response_ids)) > 0.1
    assert differ, "both versions say the same: the test shows nothing"
    after = finish(engine, [group((1, 2, 3), 2, BUDGET)])
    check_all(new, after)
    assert all(r.policy_versions == (3,) for r in after.values())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("s", [CHAINS[2], TREES[1], "switching"], ids=lambda s: getattr(s, "name", s))
def test_drafter_loads_mid_response_change_nothing_but_speed(kind: str, s: DraftStrategy | str) -> None:
    model = model_of(kind)
    engine, found = running_engine(kind, s), {}
    for version in range(1, 6):
        drafter = contrary_drafter(spec_of(model)) if version % 2 else random_drafter(spec_of(model), seed=version)
        engine.load_drafter(version, drafter)
        for r in engine.step():
            found[r.rollout_id] = r
    found |= finish(engine)
    check_all(model, found)
    assert all(r.drafter_versions == tuple(range(len(r.drafter_versions))) for r in found.values())
    assert max(len(r.drafter_versions) for r in found.values()) == 6
    assert all(r.policy_versions == (0,) for r in found.values())


def test_both_kinds_of_load_and_a_switch_in_every_round() -> None:
    """Losslessness 4, all at once: replayed token by token under the version that served it."""
    models = [model_of("qwen3", n) for n in range(3)]
    engine = running_engine("qwen3", "switching", 1)
    served: dict[str, list[int]] = {}
    found = {}
    for n in range(60):
        before = {r.rollout_id: r.num_tokens for r in engine.running()}
        version = min(n // 4, 2)
        if n % 4 == 0:
            engine.load_policy(n, tensors_of(models[version]))
        engine.load_drafter(n, random_drafter(spec_of(models[0]), seed=n))
        done = engine.step()
        after = {r.rollout_id: r.num_tokens for r in engine.running()}
        after |= {r.rollout_id: len(r.response_ids) for r in done}
        for key, count in after.items():
            served.setdefault(key, [0] * before[key]).extend([version] * (count - before[key]))
        found |= {r.rollout_id: r for r in done}
        if not engine.num_running:
            break
    assert len(found) == 8
    for key, r in found.items():
        lost = [lost_logits(model, r.prompt_ids, r.response_ids) for model in models]
        assert all(lost[version][t] < 1e-4 for t, version in enumerate(served[key])), key
        assert len(served[key]) == len(r.response_ids) and len(set(served[key])) > 1


@pytest.mark.parametrize("what", bad_loads(spec_of(model_of("llama")), tensors_of(model_of("llama"))))
def test_row_30_a_refused_policy_changes_no_output(what: str) -> None:
    model = model_of("llama")
    engine = running_engine("llama", CHAINS[2])
    with pytest.raises(WeightError, match="nothing changed"):
        engine.load_policy(1, bad_loads(spec_of(model), tensors_of(model_of("llama", 1)))[what])
    assert engine.versions == ServedVersions(0, 0)
    found = finish(engine)
    check_all(model, found)
    assert all(r.policy_versions == (0,) for r in found.values())


def bad_drafters(good: dict[str, Tensor], policy: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    nan = good["fc.weight"].clone()
    nan[3, 3] = torch.nan
    return {
        "nothing": {},
        "renamed": {f"model.{k}": v for k, v in good.items()},
        "one missing": {k: v for k, v in good.items() if k != "fc.weight"},
        "mis-shaped": good | {"fc.weight": good["fc.weight"].T},
        "wider": good | {"fc.weight": torch.zeros(32, 96)},
        "nan": good | {"fc.weight": nan},
        "the target's head with it": good | {"lm_head.weight": policy["lm_head.weight"] * 0},
        "the target's embedding with it": good | {"embed_tokens.weight": policy["model.embed_tokens.weight"] * 0},
        "a policy": policy,
    }


BAD_DRAFTERS = list(bad_drafters(random_drafter(spec_of(model_of("llama"))), tensors_of(model_of("llama"))))


@pytest.mark.parametrize("what", BAD_DRAFTERS)
def test_row_30_a_refused_drafter_changes_neither_output_nor_speed(what: str) -> None:
    model = model_of("llama")
    policy, good = tensors_of(model), random_drafter(spec_of(model), seed=5)
    plain = finish(running_engine("llama", CHAINS[2]))
    engine = running_engine("llama", CHAINS[2])
    with pytest.raises(WeightError, match="nothing changed"):
        engine.load_drafter(1, bad_drafters(good, policy)[what])
    assert engine.versions == ServedVersions(0, 0)
    found = finish(engine)
    check_all(model, found)
    assert {k: r.acceptance for k, r in found.items()} == {k: r.acceptance for k, r in plain.items()}


def test_older_versions_are_refused_and_equal_ones_are_not() -> None:
    model, other = model_of("llama"), model_of("llama", 1)
    engine = make_engine(model, CHAINS[2], random_drafter(spec_of(model)))
    engine.load_policy(4, tensors_of(model))
    engine.load_drafter(7, random_drafter(spec_of(model)))
    with pytest.raises(WeightError, match="policy version 3 is older than the served 4; nothing was loaded"):
        engine.load_policy(3, tensors_of(other))
    with pytest.raises(WeightError, match="drafter version 6 is older than the served 7"):
        engine.load_drafter(6, contrary_drafter(spec_of(model)))
    assert engine.versions == ServedVersions(4, 7)
    check_all(model, finish(engine, [group((1, 2, 3), 2, BUDGET)]))
    engine.load_policy(4, tensors_of(model))
    engine.load_drafter(7, random_drafter(spec_of(model)))
    assert engine.versions == ServedVersions(4, 7)


def weight_tensors(weights) -> list[Tensor]:
    layers = [t for layer in weights.layers for t in vars(layer).values() if t is not None]
    return [weights.embed, weights.norm, weights.head, *layers]


def drafter_tensors(eagle: EagleDrafting) -> list[Tensor]:
    network = eagle._network
    assert isinstance(network, EagleNetwork)
    return [network.fc, *(t for t in vars(network.layer).values() if t is not None)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_drafter_load_never_touches_the_target_nor_the_reverse(kind: str) -> None:
    model = model_of(kind)
    engine = make_engine(model, CHAINS[2], random_drafter(spec_of(model)))
    target, eagle = engine._target, engine._proposer.eagle
    before = [t.clone() for t in weight_tensors(target.weights)]
    engine.load_drafter(1, contrary_drafter(spec_of(model)))
    assert all(torch.equal(a, b) for a, b in zip(weight_tensors(target.weights), before, strict=True))
    drafter = [t.clone() for t in drafter_tensors(eagle)]
    engine.load_policy(1, tensors_of(model_of(kind, 1)))
    after = drafter_tensors(eagle)
    assert all(torch.equal(a, b) for a, b in zip(after, drafter, strict=True))
    assert not torch.equal(target.weights.embed, before[0])


def test_a_published_tensor_may_be_written_on() -> None:
    """In one process the trainers go on updating the very tensors they published."""
    model = model_of("qwen2")
    policy = {k: v.clone() for k, v in tensors_of(model).items()}
    drafter = random_drafter(spec_of(model))
    engine = make_engine(model, CHAINS[2], load=False)
    engine.load_policy(0, policy)
    engine.load_drafter(0, drafter)
    plain = finish(make_engine(model, CHAINS[2], random_drafter(spec_of(model))), [group((1, 2, 3), 2, BUDGET)])
    for t in (*policy.values(), *drafter.values()):
        t.fill_(9.0)
    found = finish(engine, [group((1, 2, 3), 2, BUDGET)])
    check_all(model, found)
    assert {k: r.acceptance for k, r in found.items()} == {k: r.acceptance for k, r in plain.items()}


def test_an_eagle_strategy_without_a_drafter_says_so() -> None:
    engine = make_engine(model_of("llama"), CHAINS[2])
    engine.submit([group((1, 2, 3), 1, BUDGET)])
    with pytest.raises(WeightError, match="needs a drafter: load one, or use strategy off"):
        engine.step()
    engine.force_strategy(OFF)
    found = finish(engine)
    check_all(model_of("llama"), found)
    assert all(r.drafter_versions == () for r in found.values())


def test_versions_before_any_load() -> None:
    engine = make_engine(model_of("llama"), load=False)
    assert engine.versions == ServedVersions(None, None)
    with pytest.raises(AssertionError, match="load a policy version first"):
        engine.step()


def test_a_forced_strategy_holds_until_it_is_given_back() -> None:
    model = model_of("llama")
    engine = make_engine(model, CHAINS[2], random_drafter(spec_of(model)))
    engine.submit([group((1, 2, 3), 1, SamplingParams(temperature=0.0, max_tokens=24))])
    names = []
    for forced in (None, OFF, OFF, SUFFIX[0], TREES[1], None):
        engine.force_strategy(forced)
        engine.step()
        names.append(engine.last_strategy.name)
    assert names[:3] == [CHAINS[2].name, "off", "off"] and names[4:] == [TREES[1].name, CHAINS[2].name]
    assert names[3] in ("off", SUFFIX[0].name)
    found = finish(engine)
    check_all(model, found)
    assert sum(next(iter(found.values())).acceptance.steps_by_strategy.values()) >= 6
