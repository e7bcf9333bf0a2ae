"""Weights through the handle on a running SGLang engine, over a stand-in with SGLang's asynchronous face."""

from __future__ import annotations

import pytest
import torch

from services.core.errors import ConfigError, TransferError, WaitTimeoutError, WeightError
from services.core.types import ServedVersions
from services.rollout.sglang.launch import SGLangHandle
from services.rollout.sglang.loader import TORN, serve_parts
from tests.services.rollout.coming import Coming
from tests.services.rollout.sglang.fused import same
from tests.services.rollout.sglang.handles import STOP, asked, news, wait_until
from tests.services.rollout.sglang.manager import DRAFTER, POLICY, Engine, chunk_of


def test_a_load_reaches_its_model_and_is_told_by_it(engine: Engine, handle: SGLangHandle) -> None:
    assert handle.served() == ServedVersions(None, None)
    handle.load("policy", 3, POLICY)
    handle.load("drafter", 5, DRAFTER | {"fc.bias": torch.zeros(32)})
    models = engine.tokenizer_manager.models
    assert same(models["policy"].tensors(), POLICY)
    assert same(models["drafter"].tensors(), DRAFTER | {"fc.bias": torch.zeros(32)})
    assert handle.served() == ServedVersions(3, 5)
    updates = [call for call in engine.tokenizer_manager.calls if call[0] == "update"]
    assert updates == [
        ("update", "longtail/policy/3/0/1", True, True),
        ("update", "longtail/drafter/5/0/1", False, True),
    ], "only a policy makes prefixes stale"


def test_row_35_a_load_holds_what_runs_and_lets_it_go_on(engine: Engine, handle: SGLangHandle) -> None:
    """A policy retracts (keys and values are computed anew), a drafter only holds."""
    handle.submit(asked("a"))
    handle.load("policy", 1, POLICY)
    handle.load("drafter", 1, DRAFTER)
    assert engine.tokenizer_manager.calls == [
        ("pause", "retract"), ("update", "longtail/policy/1/0/1", True, True), ("continue",),
        ("pause", "in_place"), ("update", "longtail/drafter/1/0/1", False, True), ("continue",),
    ]  # fmt: skip
    engine.say("a", chunk_of([5], STOP))
    assert [u.finish for u in news(handle)] == ["stop"]


def test_a_version_in_parts_flushes_with_its_last(engine: Engine) -> None:
    handle = SGLangHandle(engine, "rollout-3", 1, False, 60.0, device="cpu", part_bytes=12_000)
    handle.load("policy", 2, POLICY)
    parts = len(serve_parts(POLICY, 12_000))
    assert parts > 2
    assert engine.tokenizer_manager.calls == [
        ("pause", "retract"),
        *[("update", f"longtail/policy/2/{n}/{parts}", n == parts - 1, True) for n in range(parts)],
        ("continue",),
    ]
    assert handle.served().policy == 2 and same(engine.tokenizer_manager.models["policy"].tensors(), POLICY)
    bad = POLICY | {"lm_head.weight": POLICY["lm_head.weight"] * torch.nan}
    with pytest.raises(WeightError):
        handle.load("policy", 3, bad)
    assert handle.served().policy == TORN and paired(engine)
    handle.close()


def test_a_policy_that_is_on_its_way_goes_over_part_by_part(engine: Engine, handle: SGLangHandle) -> None:
    coming = Coming(POLICY)
    assert coming.num_parts > 2
    handle.receive(2, coming)
    assert engine.tokenizer_manager.calls == [
        ("pause", "retract"),
        *[("update", f"longtail/policy/2/{n}/{coming.num_parts}", n == coming.num_parts - 1, True)
          for n in range(coming.num_parts)],
        ("continue",),
    ]  # fmt: skip
    assert handle.served().policy == 2 and same(engine.tokenizer_manager.models["policy"].tensors(), POLICY)


def test_row_34_a_transfer_that_breaks_off_lets_the_requests_go_on(engine: Engine, handle: SGLangHandle) -> None:
    """Before its first part it has not even held them."""
    with pytest.raises(TransferError):
        handle.receive(2, Coming(POLICY, break_at=0))
    assert engine.tokenizer_manager.calls == [] and handle.served().policy is None
    with pytest.raises(TransferError):
        handle.receive(2, Coming(POLICY, break_at=2))
    assert paired(engine) and handle.served().policy == TORN
    handle.load("policy", 2, POLICY)
    assert handle.served().policy == 2 and same(engine.tokenizer_manager.models["policy"].tensors(), POLICY)


def paired(engine: Engine) -> bool:
    """Every pause has its continue, and nothing is loaded after it."""
    names = [call[0] for call in engine.tokenizer_manager.calls]
    return (
        names[-1] == "continue"
        and names.count("pause") == names.count("continue")
        and not engine.tokenizer_manager.paused
    )


@pytest.mark.parametrize("kind", ["policy", "drafter"])
def test_row_34_a_refused_load_lets_the_requests_go_on(engine: Engine, handle: SGLangHandle, kind: str) -> None:
    handle.submit(asked("a"))
    with pytest.raises(WeightError, match=f"{kind} load refused, nothing changed: the engine's model has no"):
        handle.load(kind, 1, {"x.weight": torch.ones(2)})  # type: ignore[arg-type]
    assert paired(engine) and handle.served() == ServedVersions(None, None)


def test_row_34_a_load_that_fails_lets_the_requests_go_on(engine: Engine, handle: SGLangHandle) -> None:
    engine.tokenizer_manager.trouble.update_error = AssertionError("dp_size must be 1")
    with pytest.raises(AssertionError, match="dp_size"):
        handle.load("policy", 1, POLICY)
    assert paired(engine)


@pytest.mark.parametrize("hang", ["pause", "update"])
def test_row_34_a_load_that_never_ends_lets_the_requests_go_on(engine: Engine, hasty: SGLangHandle, hang: str) -> None:
    """Whoever waited gives up with a message; a pause without its continue would hold every request for ever."""
    engine.tokenizer_manager.trouble.hang = hang
    with pytest.raises(WaitTimeoutError, match="rollout-3: SGLang did not finish loading policy version 7 within"):
        hasty.load("policy", 7, POLICY)
    wait_until(lambda: paired(engine))
    engine.tokenizer_manager.trouble.hang = ""
    hasty._timeout_s = 60.0
    hasty.load("policy", 8, POLICY)
    assert paired(engine) and hasty.served() == ServedVersions(8, None)


def test_row_36_what_is_sent_does_not_share_memory_with_the_trainers(engine: Engine, handle: SGLangHandle) -> None:
    """In one process the trainers go on updating the very tensors they published."""
    mine = {name: t.clone() for name, t in POLICY.items()}
    handle.load("policy", 1, mine)
    for t in mine.values():
        t.fill_(9.0)
    assert same(engine.tokenizer_manager.models["policy"].tensors(), POLICY)


def test_every_rank_gets_a_payload(engine: Engine) -> None:
    handle = SGLangHandle(engine, "rollout-3", 4, False, 60.0, device="cpu")
    seen: list[int] = []
    update = engine.tokenizer_manager.update_weights_from_tensor

    async def counted(obj, request):
        seen.append(len(obj.serialized_named_tensors))
        return await update(obj, request)

    engine.tokenizer_manager.update_weights_from_tensor = counted  # type: ignore[method-assign]
    handle.load("policy", 1, POLICY)
    assert seen == [4]
    handle.close()


def test_versions_need_the_plug_in(engine: Engine, handle: SGLangHandle) -> None:
    engine.tokenizer_manager.trouble.plugin = False
    with pytest.raises(ConfigError, match="rollout-3: SGLang runs without the 'longtail' plug-in: see its log"):
        handle.served()


@pytest.mark.parametrize(("hang", "what"), [("state", "the served versions"), ("release", "releasing its memory")])
def test_every_call_says_what_it_waited_for(engine: Engine, hasty: SGLangHandle, hang: str, what: str) -> None:
    engine.tokenizer_manager.trouble.hang = hang
    with pytest.raises(WaitTimeoutError, match=f"did not finish {what} within"):
        hasty.served() if hang == "state" else hasty.switch_memory(True)
