"""Weights and memory of the SGLang adapter, over a fake engine that computes for real."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.core.errors import (
    RequestError,
    WeightError,
)
from services.core.types import Rollout, ServedVersions
from services.rollout.sglang.engine import SGLangEngine
from services.rollout.sglang.loader import TORN
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.models.tiny import random_drafter, spec_of, tensors_of
from tests.services.rollout.engines import (
    GREEDY,
    check_all,
    check_greedy,
    group,
    letters,
    ticking,
)
from tests.services.rollout.sglang.fake import FakeHandle, limits_of
from tests.services.rollout.sglang.fused import same
from tests.services.rollout.sglang.serving import (
    CHAIN,
    DRAFTER,
    EPOCH,
    MODEL,
    OTHER,
    PROMPT,
    STRATEGIES,
    check_counters,
    drain,
    served,
)


def test_row_33_a_load_aborts_nothing() -> None:
    """16 long generations live through a policy and two drafters: each part is the version's that served it."""
    service, handle = served(CHAIN)
    service.submit([group((1, 3 + n), 4, replace(GREEDY, max_tokens=40)) for n in range(4)], EPOCH)
    for _ in range(4):
        report = service.advance(0.0, EPOCH)
    known = {r.rollout_id: r.num_tokens for r in report.running}
    assert len(known) == 16
    assert service.load_drafter(3, random_drafter(spec_of(MODEL), seed=4), EPOCH) == ServedVersions(0, 3)
    assert service.load_policy(1, tensors_of(OTHER), EPOCH) == ServedVersions(1, 3)
    assert service.load_drafter(3, random_drafter(spec_of(MODEL), seed=4), EPOCH) == ServedVersions(1, 3)
    assert handle.loads[2:] == [("drafter", 3), ("policy", 1), ("drafter", 3)]
    found = drain(service)
    assert found.keys() == known.keys()
    for key, r in found.items():
        cut = known[key]
        assert len(r.response_ids) == 40 and r.policy_versions == (0, 1) and r.drafter_versions == (0, 3)
        check_greedy(MODEL, r.prompt_ids, r.response_ids[:cut])
        check_greedy(OTHER, (*r.prompt_ids, *r.response_ids[:cut]), r.response_ids[cut:], key)
        check_counters(r, CHAIN)
    after = drain(service, [group(PROMPT, 2)])
    check_all(OTHER, after)
    assert all((r.policy_versions, r.drafter_versions) == ((1,), (3,)) for r in after.values())
    assert service.load_policy(2, tensors_of(MODEL), EPOCH) == ServedVersions(2, 3)


def test_the_first_load_of_a_fresh_engine() -> None:
    engine = SGLangEngine(FakeHandle(MODEL, CHAIN), limits_of(MODEL, CHAIN), {3: CHAIN}, letters, ticking())
    assert engine.versions == ServedVersions(None, None)
    engine.load_policy(7, tensors_of(MODEL))
    assert engine.versions == ServedVersions(7, None)
    engine.submit([group(PROMPT, 1)])
    engine.load_drafter(2, DRAFTER)
    (r,) = finish_all(engine)
    assert (r.policy_versions, r.drafter_versions) == ((7,), (2,))


def finish_all(engine: SGLangEngine) -> list[Rollout]:
    found = []
    while engine.num_running or engine.num_waiting:
        found += engine.step(0.0)
    return found


BAD_POLICIES = {
    "nothing": lambda t: {},
    "renamed": lambda t: {f"x.{k}": v for k, v in t.items()},
    "one missing": lambda t: dict(list(t.items())[1:]),
    "mis-shaped": lambda t: t | {"model.norm.weight": torch.ones(31)},
    "a drafter": lambda t: DRAFTER,
    "nan": lambda t: t | {"model.norm.weight": torch.full((32,), torch.nan)},
    "infinite": lambda t: t | {"lm_head.weight": t["lm_head.weight"] / 0},
}


@pytest.mark.parametrize("what", BAD_POLICIES)
def test_row_30_a_refused_policy_changes_nothing(what: str) -> None:
    service, handle = served(CHAIN)
    service.submit([group(PROMPT, 2)], EPOCH)
    service.advance(0.0, EPOCH)
    before = handle.target.tensors()
    with pytest.raises(WeightError, match="nothing changed"):
        service.load_policy(1, BAD_POLICIES[what](tensors_of(OTHER)), EPOCH)
    assert same(handle.target.tensors(), before) and service.open_epoch(EPOCH) == ServedVersions(0, 0)
    found = drain(service)
    check_all(MODEL, found)
    assert all(r.policy_versions == (0,) for r in found.values())


@pytest.mark.parametrize("what", ["nothing", "renamed", "the zeros too", "nan", "a policy", "the head too"])
def test_row_30_a_refused_drafter_changes_nothing(what: str) -> None:
    head = {"lm_head.weight": tensors_of(MODEL)["lm_head.weight"]}
    bad = {
        "nothing": {},
        "renamed": {f"model.{k}": v for k, v in DRAFTER.items()},
        "the zeros too": DRAFTER | {"fc.bias": torch.zeros(32)},
        "nan": DRAFTER | {"fc.weight": DRAFTER["fc.weight"] * torch.nan},
        "a policy": tensors_of(OTHER),
        "the head too": DRAFTER | head,
    }[what]
    service, handle = served(CHAIN)
    drafter, target = handle.draft.tensors(), handle.target.tensors()
    with pytest.raises(WeightError, match="nothing changed"):
        service.load_drafter(1, bad, EPOCH)
    assert same(handle.draft.tensors(), drafter) and same(handle.target.tensors(), target)
    assert service.open_epoch(EPOCH) == ServedVersions(0, 0)


@pytest.mark.parametrize("fault", [{"refuse": "no room, nothing changed"}, {"lose_tensors": True}], ids=str)
def test_row_30_what_sglang_refuses_is_not_served(fault: dict[str, object]) -> None:
    service, handle = served(CHAIN)
    for name, value in fault.items():
        setattr(handle.faults, name, value)
    for load in (service.load_policy, service.load_drafter):
        tensors = tensors_of(OTHER) if load == service.load_policy else DRAFTER
        with pytest.raises(WeightError, match="nothing changed"):
            load(1, tensors, EPOCH)
    assert service.open_epoch(EPOCH) == ServedVersions(0, 0)
    check_all(MODEL, drain(service, [group(PROMPT, 2)]))


def test_row_23_a_version_that_failed_halfway_is_told_as_no_version_at_all() -> None:
    """Served weights are neither the old nor the new ones then: whoever compares versions must see it, and so must
    every rollout that goes on under them. The next whole version mends it."""
    service, handle = served(CHAIN, part_bytes=10_000)
    service.submit([group(PROMPT, 2, replace(GREEDY, max_tokens=30))], EPOCH)
    service.advance(0.0, EPOCH)
    handle.faults.spoil_part = 2
    with pytest.raises(WeightError, match="the engine's model has no"):
        service.load_policy(1, tensors_of(OTHER), EPOCH)
    assert service.advance(0.0, EPOCH).versions == ServedVersions(TORN, 0)
    handle.faults.spoil_part = None
    assert service.load_policy(2, tensors_of(OTHER), EPOCH) == ServedVersions(2, 0)
    assert all(r.policy_versions == (0, TORN, 2) for r in drain(service).values())
    check_all(OTHER, drain(service, [group(PROMPT, 2)]))


def test_row_23_an_engine_that_tells_another_version_is_an_alarm() -> None:
    service, handle = served(CHAIN)
    handle.faults.tell_version = 6
    with pytest.raises(WeightError, match="policy version 8 was loaded, but SGLang reports 6: restart this server"):
        service.load_policy(8, tensors_of(OTHER), EPOCH)
    assert service.advance(0.0, EPOCH).versions == ServedVersions(6, 6), "what it says, not what was wanted"


def test_older_versions_are_refused_and_equal_ones_are_not() -> None:
    service, handle = served(CHAIN)
    service.load_policy(4, tensors_of(MODEL), EPOCH)
    service.load_drafter(7, DRAFTER, EPOCH)
    count = len(handle.loads)
    with pytest.raises(WeightError, match="policy version 3 is older than the served 4; nothing was loaded"):
        service.load_policy(3, tensors_of(OTHER), EPOCH)
    with pytest.raises(WeightError, match="drafter version 6 is older than the served 7"):
        service.load_drafter(6, DRAFTER, EPOCH)
    assert len(handle.loads) == count
    assert service.load_policy(4, tensors_of(MODEL), EPOCH) == ServedVersions(4, 7)


def test_row_24_each_kind_of_load_reaches_its_model_only() -> None:
    service, handle = served(CHAIN)
    target, drafter = handle.target.tensors(), handle.draft.tensors()
    service.load_policy(1, tensors_of(OTHER), EPOCH)
    assert same(handle.draft.tensors(), drafter) and same(handle.target.tensors(), tensors_of(OTHER))
    target = handle.target.tensors()
    other = random_drafter(spec_of(MODEL), seed=8)
    service.load_drafter(1, other, EPOCH)
    assert same(handle.target.tensors(), target)
    assert same(handle.draft.tensors(), other | {"fc.bias": torch.zeros(32)}), "zeros travel with every drafter"


@pytest.mark.parametrize("s", [OFF, STRATEGIES[4]], ids=lambda s: s.name)
def test_an_engine_without_a_drafter_takes_none(s: DraftStrategy) -> None:
    service, _ = served(s)
    with pytest.raises(WeightError, match=f"strategy {s.name} runs without a drafter"):
        service.load_drafter(1, DRAFTER, EPOCH)


# ------------------------------------------------------------------ memory


def test_memory_is_lent_out_and_taken_back() -> None:
    service, handle = served(CHAIN)
    service.submit([group(PROMPT, 1)], EPOCH)
    with pytest.raises(RequestError, match="1 requests run: release the memory when all have ended"):
        service.switch_memory(True, EPOCH)
    drain(service)
    assert service.switch_memory(False, EPOCH) is None, "it has its memory"
    switch = service.switch_memory(True, EPOCH)
    assert switch is not None and switch.released and switch.num_bytes == 600_000 and switch.seconds > 0
    assert service.switch_memory(True, EPOCH) is None, "a message that comes twice changes nothing"
    with pytest.raises(RequestError, match="resume it first"):
        service.submit([group(PROMPT, 1)], EPOCH)
    with pytest.raises(WeightError, match="policy version 1 cannot be loaded: the memory is released, resume it first"):
        service.load_policy(1, tensors_of(MODEL), EPOCH)
    back = service.switch_memory(False, EPOCH)
    assert back is not None and not back.released and back.num_bytes == 590_000
    check_all(MODEL, drain(service, [group(PROMPT, 2)]))
    assert handle.loads == [("policy", 0), ("drafter", 0)]


def test_the_next_report_tells_what_was_lent_and_taken_back_once() -> None:
    service, _ = served(CHAIN)
    switches = (service.switch_memory(True, EPOCH), service.switch_memory(False, EPOCH))
    assert service.advance(0.0, EPOCH).memory_switches == switches
    assert service.advance(0.0, EPOCH).memory_switches == ()


def test_close_reaches_the_handle() -> None:
    handle = FakeHandle(MODEL, OFF)
    SGLangEngine(handle, limits_of(MODEL, OFF), {0: OFF}, letters, ticking()).close()
    assert handle.closed
