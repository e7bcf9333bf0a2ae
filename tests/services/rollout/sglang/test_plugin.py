"""The plug-in's hooks, applied as SGLang applies them."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.models.eagle import Eagle
from services.models.target import target_names
from services.rollout.sglang import plugin
from services.rollout.sglang.bundle import bundled
from services.rollout.sglang.capture import KEEP
from services.rollout.sglang.captured import CapturedStates, capture_file, read_capture
from services.rollout.sglang.loader import LoadOrder, serve_parts, served_version
from services.rollout.sglang.undrafted import CHAIN_SAMPLING
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.sglang.fused import FusedModel, same
from tests.services.rollout.sglang.standins import (
    Algorithm,
    Batch,
    Cache,
    HookRegistry,
    HookType,
    MultiprocessingSerializer,
    RpcReqInput,
    RpcReqOutput,
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
RPC = f"{SRT}.managers.scheduler.Scheduler.handle_rpc_request"
PREFILL = f"{SRT}.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill"
VERIFIED = f"{SRT}.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode"
WORKER = f"{SRT}.speculative.eagle_worker_v2.EAGLEWorkerV2"
RESULTS = f"{SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
SWITCHING = {
    f"{SRT}.managers.scheduler.Scheduler.init_all_cuda_graphs": ["self"],
    f"{SRT}.speculative.adaptive_runtime_state.AdaptiveController.init_states": ["self", "cuda_graph_bs"],
    f"{SRT}.model_executor.model_runner.ModelRunner.max_decode_logits_rows": ["self"],
    f"{WORKER}.forward_batch_generation": ["self", "batch", "on_publish", "grammar_barrier"],
    f"{WORKER}.activate_step_by_batch": ["self", "batch_size"],
    f"{WORKER}.on_verify_complete_cpu": ["self", "num_correct_drafts_per_req", "batch_size"],
    f"{RESULTS}._resolve_spec_v2_tokens": ["self", "result", "batch"],
    f"{RESULTS}.process_batch_result_decode": ["self", "batch", "result"],
    f"{RESULTS}.process_batch_result_prefill": ["self", "batch", "result"],
    CHAIN_SAMPLING: [
        "predicts", "accept_index", "accept_token_num", "candidates", "retrive_index", "retrive_next_token",
        "retrive_next_sibling", "uniform_samples", "uniform_samples_for_final_sampling", "target_probs", "draft_probs",
        "threshold_single", "threshold_acc", "deterministic",
    ],
}  # fmt: skip
CAPTURING = f"{SRT}.distributed.parallel_state.GroupCoordinator.graph_capture"
CAPTURING_DRAFTER = f"{SRT}.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs"
SWITCHING_PAUSE = f"{SRT}.managers.scheduler.Scheduler.pause_generation"
SWITCHING_OFF = f"{WORKER}._build_trivial_verify_input"
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
    payloads = [MultiprocessingSerializer.serialize(bundled(named)) for named in ranks]
    return UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, load_format=load_format)


def whole(kind: str, version: int, tensors: dict[str, Tensor]) -> UpdateWeightsFromTensorReqInput:
    return request(LoadOrder(kind, version, 0, 1).text(), list(tensors.items()))


def stock(worker: Any, request: Any) -> tuple[bool, str]:
    return True, f"stock {request.load_format}"


# ------------------------------------------------------------------ registration


def test_what_is_hooked_and_how() -> None:
    kinds = {target: kind for target, (_, kind) in HookRegistry.hooks.items()}
    around, before, after = HookType.AROUND, HookType.BEFORE, HookType.AFTER
    assert kinds == {
        LOAD_TARGET: around, LOAD_DRAFT: around, FLUSH: around, RPC: around, PREFILL: before, VERIFIED: before,
        STATE: after, TELL: after, SWITCHING_PAUSE: before, SWITCHING_OFF: after,
        CAPTURING: around, CAPTURING_DRAFTER: around,
        **dict.fromkeys(SWITCHING, around),
    }  # fmt: skip


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


# ------------------------------------------------------------------ hidden states


def eagle_scheduler(rank: int = 0, algorithm: Algorithm = Algorithm.EAGLE) -> Scheduler:
    model = target()
    HookRegistry.hooked(LOAD_TARGET, stock)(worker_of(model), whole("policy", 4, tensors_of(MODEL)))
    return Scheduler(worker_of(model), draft_worker_of(drafter(), rank, model, algorithm))


def call(scheduler: Scheduler, method: str, **parameters: Any) -> RpcReqOutput:
    request = RpcReqInput(method=method, parameters=parameters)
    return HookRegistry.hooked(RPC, Scheduler.handle_rpc_request)(scheduler, request)


def take(scheduler: Scheduler) -> CapturedStates:
    with capture_file() as (path, descriptor):
        assert call(scheduler, plugin.TAKE_STATES, path=path) == RpcReqOutput(success=True, message="")
        return read_capture(descriptor)


def batch_of(*keys: str | None, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(reqs=[SimpleNamespace(rid=f"{n}/g#0", extra_key=k) for n, k in enumerate(keys)], **fields)


def prefill(scheduler: Scheduler, batch: SimpleNamespace, states: Tensor, behind: Tensor) -> str:
    """As EAGLEWorkerV2 calls it."""
    hooked = HookRegistry.hooked(PREFILL, lambda worker, batch, states, ids, embeds=None: "drafted")
    return hooked(scheduler.draft_worker.draft_worker, batch, states, behind, None)


def verified(scheduler: Scheduler, batch: SimpleNamespace, result: SimpleNamespace) -> None:
    HookRegistry.hooked(VERIFIED, lambda worker, batch, result: None)(
        scheduler.draft_worker.draft_worker, batch, result
    )


def result_of(states: Tensor, predicted: list[int], accepted: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        logits_output=SimpleNamespace(hidden_states=states),
        next_token_ids=torch.tensor(predicted, dtype=torch.int32),
        accept_lens=torch.tensor(accepted, dtype=torch.int32),
    )


def some_calls(scheduler: Scheduler) -> None:
    batch = batch_of(
        KEEP + "0", None, KEEP + "0", prefix_lens=[0, 0, 1], extend_lens=[2, 1, 1], input_ids=torch.arange(4)
    )
    assert prefill(scheduler, batch, torch.arange(12.0).reshape(4, 3), torch.tensor([5, 6, 7])) == "drafted"
    batch = batch_of(KEEP + "0", None, KEEP + "0", seq_lens=torch.tensor([2, 1, 2]))
    verified(scheduler, batch, result_of(torch.ones(6, 3), [1, 2, 3, 4, 5, 6], [2, 1, 1]))


def test_states_are_kept_when_asked_for_and_of_the_requests_that_ask() -> None:
    scheduler = eagle_scheduler()
    some_calls(scheduler)  # nothing is set aside yet
    assert call(scheduler, plugin.CAPTURE_STATES, limit_bytes=10_000).success
    some_calls(scheduler)
    batch = batch_of(None, "other", seq_lens=torch.tensor([2, 1]))
    verified(scheduler, batch, result_of(torch.ones(2, 3), [1, 2], [1, 1]))
    captured = take(scheduler)
    assert captured.engine == "SGLang 0.5.17" and captured.rids == ("0/g#0", "2/g#0")
    assert captured.request.tolist() == [0, 1, 0, 1] and captured.version.tolist() == [4] * 4
    assert captured.start.tolist() == [0, 1, 2, 2] and captured.count.tolist() == [2, 1, 2, 1]
    assert captured.first_row.tolist() == [0, 3, 4, 8]
    assert captured.behind.tolist() == [1, 5, 6, 7, 1, 2, 3, 4, 5, 6]
    assert torch.equal(captured.states[:4], torch.arange(12.0).reshape(4, 3))
    assert take(scheduler).rids == ()
    assert call(scheduler, plugin.CAPTURE_STATES, limit_bytes=0).success
    some_calls(scheduler)
    assert "no memory was set aside" in call(scheduler, plugin.TAKE_STATES, path="nowhere").message


def test_one_rank_keeps_the_states_of_all() -> None:
    scheduler = eagle_scheduler(rank=1)
    assert call(scheduler, plugin.CAPTURE_STATES, limit_bytes=10_000).success
    some_calls(scheduler)
    assert call(scheduler, plugin.TAKE_STATES, path="/nowhere/at/all").success, "another rank writes the file"


def test_engines_without_the_last_hidden_state_refuse() -> None:
    for scheduler in (
        eagle_scheduler(algorithm=Algorithm.EAGLE3),
        Scheduler(worker_of(target()), draft_worker_of(None)),
        Scheduler(worker_of(target()), None),
    ):
        answer = call(scheduler, plugin.CAPTURE_STATES, limit_bytes=10_000)
        assert not answer.success and "set drafter.states: policy" in answer.message


def test_a_problem_while_states_are_kept_is_an_answer_never_an_exception() -> None:
    scheduler = eagle_scheduler()
    assert call(scheduler, plugin.CAPTURE_STATES, limit_bytes=10_000).success
    batch = batch_of(KEEP + "0", seq_lens=torch.tensor([2, 2]))
    verified(scheduler, batch, result_of(torch.ones(2, 3), [1, 2], [2]))
    answer = call(scheduler, plugin.TAKE_STATES, path="nowhere")
    assert not answer.success and "a verification of 1 requests came with tensors of" in answer.message


def test_other_calls_of_the_scheduler_are_sglangs() -> None:
    scheduler = Scheduler(tree_cache=Cache(evictable=3))
    assert call(scheduler, "flush_cache", empty_cache=False).success and scheduler.emptied == [False]
    assert not call(scheduler, "no_such_method").success


SOURCE = Path(os.environ.get("LONGTAIL_SGLANG_SOURCE", "/nowhere"))


@pytest.mark.skipif(
    not SOURCE.is_dir(), reason="LONGTAIL_SGLANG_SOURCE names no folder with the source of SGLang's package"
)
def test_what_is_hooked_exists_in_sglang_with_these_arguments() -> None:
    wanted = {
        LOAD_TARGET: ["self", "recv_req"],
        LOAD_DRAFT: ["self", "recv_req"],
        FLUSH: ["self", "empty_cache"],
        RPC: ["self", "recv_req"],
        PREFILL: ["self", "batch", "target_hidden_states", "next_token_ids", "mm_input_embeds"],
        VERIFIED: ["self", "batch", "batch_result"],
        STATE: ["self", "recv_req"],
        TELL: None,
        SWITCHING_PAUSE: ["self", "recv_req"],
        SWITCHING_OFF: ["self", "batch"],
        CAPTURING: ["self", "graph_capture_context", "stream"],
        CAPTURING_DRAFTER: ["self"],
        **SWITCHING,
    }
    assert wanted.keys() == HookRegistry.hooks.keys()
    for name, arguments in wanted.items():
        function = defined(name.removeprefix("sglang."))
        assert arguments is None or [a.arg for a in function.args.args] == arguments, name


def defined(name: str) -> ast.FunctionDef:
    """Of a module, or of a class or one of its bases."""
    holder, function = name.rsplit(".", 1)
    file = SOURCE / f"{holder.replace('.', '/')}.py"
    owner = None if file.is_file() else holder.rsplit(".", 1)[1]
    if owner is not None:
        file = SOURCE / f"{holder.removesuffix(owner)[:-1].replace('.', '/')}.py"
    body = ast.parse(file.read_text()).body
    classes = {n.name: n for n in body if isinstance(n, ast.ClassDef)}
    if owner is not None:
        bases = [b.id for b in classes[owner].bases if isinstance(b, ast.Name) and b.id in classes]
        body = [n for name in (owner, *bases) for n in classes[name].body]
    return next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)
