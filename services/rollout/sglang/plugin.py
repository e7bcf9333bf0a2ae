"""The SGLang plug-in (entry-point group `sglang.srt.plugins`): loads that reach one model, versions told by the engine,
acceptance told while requests run, hidden states kept for the drafter; switching between strategies is in `switching`.

SGLang runs `register` in every one of its processes before anything is built. Hooks wrap stock methods of 0.5.17; none
of its code is changed. Beside `switching`, `catching_up`, `launch` and `start`, no module imports SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from services.core.errors import ConfigError, WeightError
from services.rollout.sglang.bundle import opened
from services.rollout.sglang.capture import KEEP, StateCapture
from services.rollout.sglang.handle import Kind
from services.rollout.sglang.loader import load_part, parse_order, served_version
from services.rollout.sglang.switching import (
    AFTER,
    AROUND,
    BEFORE,
    force_depth,
    restore_learned,
    take_spans,
    tell_learned,
    told_state,
)
from services.weights.parts import NamedTensors

PLUGIN_GROUP, PLUGIN_NAME = "sglang.srt.plugins", "longtail"
STATE_KEY = "longtail"
# Calls of the scheduler.
CAPTURE_STATES, TAKE_STATES = "longtail_capture_states", "longtail_take_states"
FORCE_DEPTH, TAKE_SPANS = "longtail_force_depth", "longtail_take_spans"
TELL_LEARNED, RESTORE_LEARNED = "longtail_tell_learned", "longtail_restore_learned"
CAPTURE = "longtail_capture"  # attribute of SGLang's draft worker
HISTOGRAM_KEY = "spec_correct_drafts_histogram"  # SGLang's own name in meta_info

DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    around: dict[str, Callable[..., Any]] = {
        "sglang.srt.managers.tp_worker.TpModelWorker.update_weights_from_tensor": _load_target,
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.update_weights_from_tensor": _load_draft,
        "sglang.srt.managers.scheduler.Scheduler.flush_cache": _flush_cache,
        "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request": _answer_rpc,
        **AROUND,
    }
    before: dict[str, Callable[..., Any]] = {
        f"{DRAFT_WORKER}._draft_extend_for_prefill": _keep_prefill,
        f"{DRAFT_WORKER}._draft_extend_for_decode": _keep_verification,
        **BEFORE,
    }
    after: dict[str, Callable[..., Any]] = {
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state": _add_versions,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.convert_logprob_style": _add_histogram,
        **AFTER,
    }
    for kind, hooks in ((HookType.AROUND, around), (HookType.BEFORE, before), (HookType.AFTER, after)):
        for target, hook in hooks.items():
            HookRegistry.register(target, hook, kind)


def _load_target(original: Callable[..., Any], worker: Any, request: Any) -> tuple[bool, str]:
    """`disable_draft_model` in the request makes SGLang call the target's worker alone."""
    return _load(original, worker, "policy", worker.model_runner.model, request)


def _load_draft(original: Callable[..., Any], worker: Any, request: Any) -> tuple[bool, str]:
    """Stock SGLang would load the same tensors into draft and target."""
    return _load(original, worker, "drafter", worker.draft_worker.draft_runner.model, request)


def _load(original: Callable[..., Any], worker: Any, kind: Kind, model: Any, request: Any) -> tuple[bool, str]:
    """`kind` of version that `model` takes."""
    order = parse_order(request.load_format)
    if order is None:
        return original(worker, request)  # type: ignore[no-any-return]
    if order.kind != kind:
        return False, f"{order.kind} load refused, nothing changed: it reached the model that takes a {kind}"
    try:
        load_part(model, order, _tensors(request, worker.ps.tp_rank))
    except WeightError as error:  # an exception here would end the scheduler's process
        return False, str(error)
    return True, f"{order.kind} version {order.version}"


def _tensors(request: Any, rank: int) -> NamedTensors:
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
    return opened(MultiprocessingSerializer.deserialize(request.serialized_named_tensors[rank]))


def _flush_cache(original: Callable[..., bool], scheduler: Any, empty_cache: bool = True) -> bool:
    """After a "retract" pause the requests wait in the queue, which stock SGLang takes for a reason not to flush: the
    prefix would stay, computed with the old weights (row 32). Nothing is running then, so all of it can go."""
    if scheduler.is_fully_idle() or not scheduler._engine_paused or not scheduler.running_batch.is_empty():
        return original(scheduler, empty_cache)
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = scheduler.tree_cache
    cache.evict(EvictParams(num_tokens=cache.evictable_size()))
    return bool(cache.evictable_size() == 0 and cache.protected_size() == 0)


def _add_versions(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """What the models in this process say they are."""
    draft = scheduler.draft_worker
    runner = getattr(getattr(draft, "draft_worker", None), "draft_runner", None)
    result.internal_state[STATE_KEY] = {
        "policy": served_version(scheduler.tp_worker.model_runner.model),
        "drafter": None if runner is None else served_version(runner.model),
        **told_state(draft),
    }
    return result


def _add_histogram(
    result: None, manager: Any, meta_info: dict[str, Any], state: Any, top: Any, ids: Any, text: Any, news: Any, at: int
) -> None:
    """Acceptance of a request that still runs: the scheduler sends the histogram with all news, but stock SGLang hands
    it on with a request's last news only. The hooked method is called once for each piece of news with logprobs."""
    told = news.spec_correct_drafts_histogram
    if told and told[at]:
        meta_info[HISTOGRAM_KEY] = told[at]


# ---------------------------------------------------------------------------- calls


def _answer_rpc(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """SGLang looks the method up on its scheduler, and turns an exception into the answer; ours may answer a text."""
    ours: dict[str, Callable[..., str | None]] = {
        CAPTURE_STATES: _capture_states, TAKE_STATES: _take_states,
        FORCE_DEPTH: force_depth, TAKE_SPANS: take_spans,
        TELL_LEARNED: tell_learned, RESTORE_LEARNED: restore_learned,
    }  # fmt: skip
    if request.method not in ours:
        return original(scheduler, request)
    texts: list[str] = []

    def call(**parameters: Any) -> None:
        text = ours[request.method](scheduler, **parameters)
        texts.extend([] if text is None else [text])

    setattr(scheduler, request.method, call)
    answer = original(scheduler, request)
    return type(answer)(success=True, message=texts[0]) if answer.success and texts else answer


# ---------------------------------------------------------------------------- hidden states


def _capture_states(scheduler: Any, limit_bytes: int) -> None:
    worker = getattr(scheduler.draft_worker, "draft_worker", None)
    if worker is None or worker.speculative_algorithm.is_eagle3():
        raise ConfigError("only an engine with an EAGLE drafter has the states to keep: set drafter.states: policy")
    capture = None
    if limit_bytes and worker.ps.tp_rank == 0:  # every rank has the same states
        capture = StateCapture(limit_bytes, torch.device(worker.device))
    setattr(worker, CAPTURE, capture)


def _take_states(scheduler: Any, path: str) -> None:
    import sglang

    worker = scheduler.draft_worker.draft_worker
    capture: StateCapture | None = getattr(worker, CAPTURE, None)
    if capture is not None:
        capture.take(path, f"SGLang {sglang.__version__}")
    elif worker.ps.tp_rank == 0:
        raise ConfigError("no memory was set aside for hidden states")


def _wanted(worker: Any, batch: Any) -> tuple[StateCapture, list[str | None], int] | None:
    """(where states go, the batch's rids with None for those nobody wants, the policy version); None when nothing of
    this batch is kept."""
    capture: StateCapture | None = getattr(worker, CAPTURE, None)
    if capture is None:
        return None
    rids = [r.rid if r.extra_key is not None and r.extra_key.startswith(KEEP) else None for r in batch.reqs]
    version = served_version(worker.target_worker.model_runner.model)
    return (capture, rids, version) if any(rids) and version is not None else None


def _keep_prefill(worker: Any, batch: Any, states: Tensor, next_token_ids: Tensor, *args: Any, **kwargs: Any) -> None:
    """Before the draft's prefill: `batch.input_ids` are the ids that the target was just fed with, `states` [ids,H] its
    last hidden states behind the final norm."""
    if wanted := _wanted(worker, batch):
        capture, rids, version = wanted
        capture.prefill(rids, batch.prefix_lens, batch.extend_lens, version, states, batch.input_ids, next_token_ids)


def _keep_verification(worker: Any, batch: Any, result: Any) -> None:
    """Before the draft catches up with a verification, chain or tree: the accepted path lies at the front of each
    request's nodes; `batch.seq_lens` is still the length before it, the root's position."""
    if wanted := _wanted(worker, batch):
        capture, rids, version = wanted
        states = result.logits_output.hidden_states
        capture.decode(rids, version, states, result.next_token_ids, result.accept_lens, batch.seq_lens)
