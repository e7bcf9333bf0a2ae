"""The plug-in's hooks, applied as SGLang applies them."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.models.eagle import Eagle
from services.models.target import target_names
from services.rollout.sglang import plugin
from services.rollout.sglang.loader import LoadOrder, serve_parts, served_version
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.sglang.fused import FusedModel, same
from tests.services.rollout.sglang.standins import (
    Batch,
    Cache,
    HookRegistry,
    HookType,
    MultiprocessingSerializer,
    Scheduler,
    UpdateWeightsFromTensorReqInput,
    draft_worker_of,
    install,
    worker_of,
)

SRT = "sglang.srt"
LOAD_TARGET = f"{SRT}.managers.tp_worker.TpModelWorker.update_weights_from_tensor"
LOAD_DRAFT = f"{SRT}.speculative.eagle_worker_v2.EAGLEWorkerV2.update_weights_from_tensor"
FLUSH = f"{SRT}.managers.scheduler.Scheduler.flush_cache"
STATE = f"{SRT}.managers.scheduler.Scheduler.get_internal_state"
TELL = f"{SRT}.managers.tokenizer_manager.TokenizerManager.convert_logprob_style"
MODEL = tiny_model("llama", 32, 0, 2.0)
METHOD = Eagle(spec_of(MODEL))
DRAFTER = random_drafter(spec_of(MODEL)) | {"fc.bias": torch.zeros(32)}


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    modules = install(monkeypatch)
    plugin.register()
    return modules


def target() -> FusedModel:
    return FusedModel(target_names(spec_of(MODEL)))


def drafter() -> FusedModel:
    return FusedModel(METHOD.names() | METHOD.engine_zeros(), "model.")


def request(load_format: str | None, *ranks: list[tuple[str, Tensor]]) -> UpdateWeightsFromTensorReqInput:
    payloads = [MultiprocessingSerializer.serialize(named) for named in ranks]
    return UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, load_format=load_format)


def whole(kind: str, version: int, tensors: dict[str, Tensor]) -> UpdateWeightsFromTensorReqInput:
    return request(LoadOrder(kind, version, 0, 1).text(), list(tensors.items()))


def stock(worker: Any, request: Any) -> tuple[bool, str]:
    return True, f"stock {request.load_format}"


# ------------------------------------------------------------------ registration


def test_what_is_hooked_and_how() -> None:
    kinds = {target: kind for target, (_, kind) in HookRegistry.hooks.items()}
    around, after = HookType.AROUND, HookType.AFTER
    assert kinds == {LOAD_TARGET: around, LOAD_DRAFT: around, FLUSH: around, STATE: after, TELL: after}


# ------------------------------------------------------------------ loads


@pytest.mark.parametrize("load_format", [None, "direct", "flattened_bucket", "other.loader"])
def test_a_load_that_is_not_ours_is_sglangs(load_format: str | None) -> None:
    model = target()
    for hook, worker in ((LOAD_TARGET, worker_of(model)), (LOAD_DRAFT, draft_worker_of(model))):
        answer = HookRegistry.hooked(hook, stock)(worker, request(load_format, [("model.norm.weight", torch.ones(32))]))
        assert answer == (True, f"stock {load_format}")
    assert served_version(model) is None and bool((model.tensors()["model.norm.weight"] == 0.5).all())


def test_ours_reach_one_model_and_leave_their_version_there() -> None:
    model, draft = target(), drafter()
    load_target, load_draft = HookRegistry.hooked(LOAD_TARGET, stock), HookRegistry.hooked(LOAD_DRAFT, stock)
    assert load_target(worker_of(model), whole("policy", 3, tensors_of(MODEL))) == (True, "policy version 3")
    assert load_draft(draft_worker_of(draft), whole("drafter", 5, DRAFTER)) == (True, "drafter version 5")
    assert same(model.tensors(), tensors_of(MODEL)) and served_version(model) == 3
    assert same(draft.tensors(), DRAFTER) and served_version(draft) == 5


def test_each_rank_opens_its_own_payload() -> None:
    """The memory behind a payload may be opened once."""
    for rank in (0, 1):
        model = target()
        named = list(tensors_of(MODEL).items())
        payloads: list[list[tuple[str, Tensor]]] = [[], []]
        payloads[rank] = named
        order = LoadOrder("policy", 1, 0, 1).text()
        answer = HookRegistry.hooked(LOAD_TARGET, stock)(worker_of(model, rank), request(order, *payloads))
        assert answer == (True, "policy version 1") and same(model.tensors(), tensors_of(MODEL))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "no tensors"),
        ({"other.weight": torch.ones(3)}, "the engine's model has no ['other.weight']"),
        (tensors_of(MODEL) | {"model.norm.weight": torch.full((32,), torch.nan)}, "hold NaN or infinity"),
    ],
    ids=["nothing", "unknown", "nan"],
)
def test_row_30_a_refusal_is_an_answer_never_an_exception(tensors: dict[str, Tensor], said: str) -> None:
    """An exception would end the scheduler's process, and with it everything that runs."""
    model = target()
    HookRegistry.hooked(LOAD_TARGET, stock)(worker_of(model), whole("policy", 1, tensors_of(MODEL)))
    ok, message = HookRegistry.hooked(LOAD_TARGET, stock)(worker_of(model), whole("policy", 2, tensors))
    assert ok is False and "policy load refused, nothing changed" in message and said in message
    assert same(model.tensors(), tensors_of(MODEL)) and served_version(model) == 1


def test_row_24_a_version_that_went_to_the_wrong_model_is_refused_part_by_part() -> None:
    """Not even the parts whose names the other model knows, like EAGLE-3's layer 0 or the embedding, may land there."""
    draft = drafter()
    before = draft.tensors()
    parts = serve_parts(tensors_of(MODEL), 2_000)
    assert len(parts) > 4
    for n, part in enumerate(parts):
        answer = HookRegistry.hooked(LOAD_DRAFT, stock)(
            draft_worker_of(draft), request(LoadOrder("policy", 1, n, len(parts)).text(), part)
        )
        assert answer == (False, "policy load refused, nothing changed: it reached the model that takes a drafter")
    model = target()
    answer = HookRegistry.hooked(LOAD_TARGET, stock)(worker_of(model), whole("drafter", 1, DRAFTER))
    assert answer == (False, "drafter load refused, nothing changed: it reached the model that takes a policy")
    assert same(draft.tensors(), before) and served_version(draft) is None and served_version(model) is None


# ------------------------------------------------------------------ the prefix cache


def flush(scheduler: Scheduler) -> bool:
    """As SGLang calls it after a load."""
    return HookRegistry.hooked(FLUSH, Scheduler.flush_cache)(scheduler, empty_cache=False)


def test_row_32_an_idle_scheduler_is_flushed_by_sglang() -> None:
    for paused in (False, True):
        scheduler = Scheduler(tree_cache=Cache(evictable=40), _engine_paused=paused)
        assert flush(scheduler) and scheduler.tree_cache == Cache() and scheduler.emptied == [False]
    assert HookRegistry.hooked(FLUSH, Scheduler.flush_cache)(scheduler) and scheduler.emptied[-1] is True


def test_row_32_after_a_retract_pause_the_waiting_requests_do_not_keep_the_prefix() -> None:
    scheduler = Scheduler(tree_cache=Cache(evictable=600), waiting_queue=["a", "b"], _engine_paused=True)
    assert Scheduler.flush_cache(scheduler) is False and scheduler.tree_cache.evictable == 600, "stock SGLang keeps it"
    assert flush(scheduler) is True and scheduler.tree_cache == Cache()
    assert scheduler.waiting_queue == ["a", "b"] and not scheduler.emptied


def test_row_32_what_cannot_be_flushed_whole_is_told() -> None:
    held = Scheduler(tree_cache=Cache(evictable=600, protected=7), waiting_queue=["a"], _engine_paused=True)
    assert flush(held) is False and held.tree_cache == Cache(protected=7)
    running = Scheduler(tree_cache=Cache(evictable=9), running_batch=Batch(["a"]), _engine_paused=True)
    going_on = Scheduler(tree_cache=Cache(evictable=9), waiting_queue=["a"])
    for scheduler in (running, going_on):
        assert flush(scheduler) is False and scheduler.tree_cache == Cache(evictable=9), "SGLang's own answer"


# ------------------------------------------------------------------ what is told


def told(scheduler: Scheduler) -> dict[str, Any]:
    result = HookRegistry.hooked(STATE, Scheduler.get_internal_state)(scheduler, object())
    assert result.internal_state["last_gen_throughput"] == 1.0
    return result.internal_state[plugin.STATE_KEY]


def test_row_23_versions_are_those_of_the_models() -> None:
    model, draft = target(), drafter()
    eagle = Scheduler(worker_of(model), draft_worker_of(draft))
    assert told(eagle) == {"policy": None, "drafter": None}
    HookRegistry.hooked(LOAD_TARGET, stock)(worker_of(model), whole("policy", 4, tensors_of(MODEL)))
    assert told(eagle) == {"policy": 4, "drafter": None}
    HookRegistry.hooked(LOAD_DRAFT, stock)(draft_worker_of(draft), whole("drafter", 9, DRAFTER))
    assert told(eagle) == {"policy": 4, "drafter": 9}
    assert told(Scheduler(worker_of(model), draft_worker_of(None))) == {"policy": 4, "drafter": None}, "n-grams"
    assert told(Scheduler(worker_of(model), None)) == {"policy": 4, "drafter": None}, "no speculation"


def test_acceptance_is_told_with_all_news_not_with_the_last_only() -> None:
    def convert(*args: Any) -> None:
        args[1]["output_token_logprobs"] = [(-0.5, 3, None)]

    hooked = HookRegistry.hooked(TELL, convert)
    news = SimpleNamespace(spec_correct_drafts_histogram=[[2, 1], []])
    for at, wanted in ((0, [2, 1]), (1, None)):
        meta: dict[str, Any] = {}
        assert hooked(object(), meta, object(), 0, None, False, news, at) is None
        assert meta.get(plugin.HISTOGRAM_KEY) == wanted and meta["output_token_logprobs"]
    for without in ([], None):  # no speculation
        meta = {}
        hooked(object(), meta, object(), 0, None, False, SimpleNamespace(spec_correct_drafts_histogram=without), 0)
        assert plugin.HISTOGRAM_KEY not in meta
