"""An SGLang engine that switches between chains of several depths and OFF, round by round, as our selector says.

Hooks on SGLang 0.5.17's own adaptive depth, in its scheduler process (`plugin` registers them). Per depth SGLang holds
a runtime state: attention backends and CUDA graphs of draft, verification and the drafter's catching up. Switching
replaces references; no request is touched: in every state, OFF too, the drafter catches up with what a round
committed, so its keys and values are always complete and the first round behind OFF drafts as well as any. The price
is the drafter's layer and the LM head once more in every round of OFF; leaving it out, as SGLang can, would leave holes
behind which nothing drafts well, since it has no way to fill them.

Four faults of 0.5.17 are put right on the way. While the state of a further depth is built, SGLang overrides depth
and batch sizes where its graph runners do not look, and they capture every batch size, and the drafter's graphs at the
first depth's width, which the state then never uses: `_arguments` sets them where they do look. The buffer of logits
that all graphs share has room for the first depth only (`_logits_rows`). With sampled drafts the verification of a
round without drafts asks for draft probabilities that nobody made (`_give_draft_probs`), and its kernel cannot be
compiled without drafts (`undrafted`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from random import Random
from typing import Any

import torch

from services.core.errors import ConfigError
from services.core.selector import SelectorState
from services.models.device import device_name, pick_device
from services.rollout.memory import gpu_memory, taken_since
from services.rollout.sglang.deciding import Decider, LaunchedRound
from services.rollout.sglang.graphs import CapturedGraphs
from services.rollout.sglang.loader import served_version
from services.rollout.sglang.order import CONFIG_FILE, SwitchOrder, read_order
from services.rollout.sglang.rounds import note_round
from services.rollout.sglang.streams import (
    CAPTURE,
    CAPTURE_DRAFTER,
    capture_drafter,
    capture_shared,
    shared_streams,
)
from services.rollout.sglang.undrafted import CHAIN_SAMPLING, verify_chain
from services.speculation.round import RoundView
from services.speculation.selector import make_selector

# Attributes of SGLang's draft worker (its Switch, or the graphs of its only strategy) and of a round's result.
SWITCH, ALONE, ROUND = "longtail_switch", "longtail_graphs", "longtail_round"
RESTORE = "adaptive_spec.restore"  # under this name SGLang notes each switch, for ever
FREE = -1  # a forced depth: none
WIDTHS = ("speculative_num_steps", "speculative_num_draft_tokens")  # start arguments

AROUND: dict[str, Callable[..., Any]] = {
    CHAIN_SAMPLING: verify_chain, CAPTURE: capture_shared, CAPTURE_DRAFTER: capture_drafter,
}  # fmt: skip
BEFORE: dict[str, Callable[..., Any]] = {}
AFTER: dict[str, Callable[..., Any]] = {}
_WORKER = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def _hook(table: dict[str, Callable[..., Any]], target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        table[target] = function
        return function

    return note


class Switch:
    """An engine's depths in this process. On the first of the ranks that share a model it decides; the others do what
    it says: their clocks, and the memory that they find free, differ. `every`: batch sizes that SGLang would capture.
    """

    def __init__(self, order: SwitchOrder, worker: Any, every: Sequence[int]) -> None:
        self.order, self.every = order, list(every)
        self._worker, self._group = worker, worker.target_worker.model_runner.tp_group
        self._leads = worker.ps.tp_rank == 0
        attention = worker.server_args.attention_backend
        self.place = f"sglang on {device_name(pick_device('auto'))}, {attention} attention"
        self.captured: dict[int, CapturedGraphs] = {}
        self._mark = time.monotonic(), gpu_memory()
        selector = make_selector(order.config, Random(order.seed))
        self.decider = Decider(selector, order.strategies, order.pool, self.captured)

    def agreed(self, value: int) -> int:
        """The first rank's value."""
        if self._worker.ps.tp_size == 1:
            return value
        told = torch.tensor([value], device="cpu")
        torch.distributed.broadcast(told, src=self._group.ranks[0], group=self._group.cpu_group)
        return int(told)

    # -- graphs

    def build_states(self, controller: Any) -> None:
        """States of all depths but the first, as far as memory goes; SGLang has built the first one's."""
        pool = self.order.pool
        self._note(pool.deepest)
        for depth in pool.order():
            if not self.agreed(int(pool.affords(depth, self.every, self.captured.values()))):
                self._say(f"depth {depth} left out: with its graphs all would exceed {pool.memory_bytes:,} bytes")
                continue
            sizes = pool.sizes(depth, self.every)
            with _arguments(_of(self._worker), sizes, depth):
                state = self._worker.build_adaptive_runtime_state(depth, depth + 1, sizes)
            controller.register(state, depth)
            self._note(depth)

    def _note(self, depth: int) -> None:
        """`depth` took what came since the last one was noted."""
        (began_s, before), self._mark = self._mark, (time.monotonic(), gpu_memory())
        sizes, (taken, fallen) = self.order.pool.sizes(depth, self.every), taken_since(before, self._mark[1])
        self.captured[depth] = CapturedGraphs(depth, sizes[-1], len(sizes), taken, fallen, self._mark[0] - began_s)
        self._say(f"depth {depth}: graphs of {len(sizes)} batch sizes up to {sizes[-1]}, {taken / 2**20:.0f} MiB")

    def _say(self, line: str) -> None:
        if self._leads:
            print(f"{self.order.server}: {line}", file=sys.stderr, flush=True)

    # -- rounds

    def launch(self, batch: Any) -> LaunchedRound | None:
        """Choose for the round of `batch` and bring its state in place. None on a rank that does not lead."""
        launched = self.decider.launch(self._view(batch), time.monotonic()) if self._leads else None
        depth = self.agreed(launched.choice.strategy.depth if launched else 0)
        if depth != self._worker.speculative_num_steps:
            self._worker.adaptive_controller._activate(depth)
            _forget_override()
        return launched

    def _view(self, batch: Any) -> RoundView:
        """SGLang's greedy requests have top_k 1 and temperature 1."""
        requests = batch.reqs
        params = [r.sampling_params for r in requests]
        temperature = sum(0.0 if p.top_k == 1 else p.temperature for p in params) / len(params)
        context = sum(len(r.origin_input_ids) + len(r.output_ids) for r in requests)
        drafter = served_version(self._worker.draft_worker.draft_runner.model) or 0
        return RoundView(len(requests), context, 0, temperature, drafter)


def switch_of(worker: Any) -> Switch | None:
    """None for an engine that keeps its strategy."""
    return getattr(worker, SWITCH, None)


def _forget_override() -> None:
    """SGLang keeps a record of every switch, and goes through all of them when its state is asked for."""
    from sglang.srt.runtime_context import get_context

    log = get_context()._overrides_log
    if log and log[-1][0] == RESTORE:
        log.pop()


# ---------------------------------------------------------------------------- capturing


def _of(worker: Any) -> list[Any]:
    """The start arguments that graph runners of target and drafter read: SGLang copies them for the drafter."""
    return [worker.target_worker.model_runner.server_args, worker.server_args]


@contextmanager
def _arguments(arguments: Sequence[Any], sizes: Sequence[int], depth: int) -> Iterator[None]:
    """Start arguments as if SGLang had been started with `depth` and these batch sizes. They are read-only for
    everybody else: nothing but graph runners is built meanwhile."""
    phases = [a.cuda_graph_config.decode for a in arguments]
    before = [(p, "bs", p.bs) for p in phases]
    before += [
        (a, n, getattr(a, n)) for a in arguments for n in ("speculative_num_steps", "speculative_num_draft_tokens")
    ]
    try:
        for phase in phases:
            phase.bs = list(sizes)
        for a in arguments:
            for name, value in zip(WIDTHS, (depth, depth + 1), strict=True):
                object.__setattr__(a, name, value)  # SGLang locks them against plain assignment
        yield
    finally:
        for owner, name, value in before:
            object.__setattr__(owner, name, value)


@_hook(AROUND, "sglang.srt.managers.scheduler.Scheduler.init_all_cuda_graphs")
def _capture(original: Callable[..., None], scheduler: Any) -> None:
    """Graphs of the first depth for its batch sizes only; `_build_states` runs inside."""
    arguments = scheduler.server_args
    order = read_order(getattr(arguments, CONFIG_FILE))
    if order is None:
        return _capture_one(original, scheduler)
    if not arguments.speculative_adaptive:
        raise ConfigError("SGLang refused to switch depths, see its log: give the selector one strategy")
    worker, every = scheduler.draft_worker, arguments.cuda_graph_config.decode.bs or []
    setattr(worker, SWITCH, Switch(order, worker, every))
    depth = order.pool.deepest
    with _arguments(_of(worker), order.pool.sizes(depth, every), depth), shared_streams():
        original(scheduler)
    return None


def _capture_one(original: Callable[..., None], scheduler: Any) -> None:
    """An engine with one strategy: only look what it takes."""
    began_s, before = time.monotonic(), gpu_memory()
    original(scheduler)
    sizes = scheduler.server_args.cuda_graph_config.decode.bs
    if scheduler.draft_worker is not None and sizes:
        depth, taken = scheduler.server_args.speculative_num_steps, taken_since(before, gpu_memory())
        graphs = CapturedGraphs(depth, max(sizes), len(sizes), *taken, time.monotonic() - began_s)
        setattr(scheduler.draft_worker, ALONE, graphs)


@_hook(AROUND, "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController.init_states")
def _build_states(original: Callable[..., None], controller: Any, *args: Any, **kwargs: Any) -> None:
    switch = switch_of(controller.worker)
    if switch is None:
        original(controller, *args, **kwargs)
    else:
        switch.build_states(controller)


@_hook(AROUND, "sglang.srt.model_executor.model_runner.ModelRunner.max_decode_logits_rows")
def _logits_rows(original: Callable[..., int], runner: Any) -> int:
    order = read_order(getattr(runner.server_args, CONFIG_FILE))
    rows = original(runner)
    return rows if order is None else max(rows, order.pool.logits_rows)


# ---------------------------------------------------------------------------- rounds


@_hook(AROUND, f"{_WORKER}.forward_batch_generation")
def _run(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    switch, mode = switch_of(worker), batch.forward_mode
    if switch is None or mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
        return original(worker, batch, *args, **kwargs)
    launched = switch.launch(batch)
    result = original(worker, batch, *args, **kwargs)
    setattr(result, ROUND, launched)
    return result


@_hook(AROUND, f"{_WORKER}.activate_step_by_batch")
def _keep_state(original: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's rule of thumb by batch size; ours has chosen already."""
    if switch_of(worker) is None:
        original(worker, *args, **kwargs)


@_hook(AROUND, f"{_WORKER}.on_verify_complete_cpu")
def _learn_nothing(original: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's rule of thumb by acceptance, which switches on its own."""
    if switch_of(worker) is None:
        original(worker, *args, **kwargs)


@_hook(AFTER, f"{_WORKER}._build_trivial_verify_input")
def _give_draft_probs(verify_input: Any, worker: Any, batch: Any) -> None:
    """Without drafts the verification of sampled drafts draws from the target alone and reads no draft probability, but
    checks that there are some: those of the first draft [B,V], which is not used, are there."""
    probs = getattr(batch.spec_info, "draft_probs", None)
    if switch_of(worker) is not None and probs is not None:
        verify_input.draft_probs = probs.unsqueeze(1)


@_hook(AROUND, f"{_RESULTS}._resolve_spec_v2_tokens")
def _count_rounds(original: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
    """Count each request's round under the depth it had; SGLang's own count, which would mix them, goes nowhere."""
    if switch_of(processor.model_worker) is None:
        return original(processor, result, batch)
    living = _living(batch)
    counts = [r.spec_correct_drafts_histogram for r in batch.reqs]
    for request in batch.reqs:
        request.spec_correct_drafts_histogram = []
    tokens = original(processor, result, batch)
    depth = result.speculative_num_draft_tokens - 1
    for i, (request, numbers) in enumerate(zip(batch.reqs, counts, strict=True)):
        request.spec_correct_drafts_histogram = numbers
        if i in living:
            note_round(numbers, depth, result.num_correct_drafts_per_req_cpu[i])
    return tokens


@_hook(AROUND, f"{_RESULTS}.process_batch_result_decode")
def _read_round(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    switch, launched = switch_of(processor.model_worker), getattr(result, ROUND, None)
    if switch is None or launched is None:
        original(processor, batch, result)
        return
    now_s = _read_at(result)
    before = {i: len(batch.reqs[i].output_ids) for i in _living(batch)}
    original(processor, batch, result)
    accepted = [result.num_correct_drafts_per_req_cpu[i] for i in before]
    tokens = sum(_length(batch.reqs[i]) - length for i, length in before.items())
    switch.decider.finish(launched, accepted, tokens, now_s)


@_hook(AROUND, f"{_RESULTS}.process_batch_result_prefill")
def _read_prefill(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    switch = switch_of(processor.model_worker)
    if switch is not None:
        switch.decider.read(_read_at(result))
    original(processor, batch, result)


@_hook(BEFORE, "sglang.srt.managers.scheduler.Scheduler.pause_generation")
def _hold(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    switch = switch_of(scheduler.draft_worker)
    if switch is not None:
        switch.decider.hold(time.monotonic())


def _read_at(result: Any) -> float:
    """SGLang waits for the result's copy next: waiting a line earlier costs nothing."""
    if result.copy_done is not None:
        result.copy_done.synchronize()
    return time.monotonic()


def _living(batch: Any) -> list[int]:
    """Requests to which the round still counts: with a round launched ahead, some have ended meanwhile."""
    return [i for i, r in enumerate(batch.reqs) if not (r.is_retracted or r.finished())]


def _length(request: Any) -> int:
    """Without what lies behind a stop."""
    known = len(request.output_ids)
    return known if request.finished_len is None else min(known, request.finished_len)


# ---------------------------------------------------------------------------- control


def told_state(worker: Any) -> dict[str, Any]:
    """What the engine's state says of its depths and their graphs; nothing for one without a drafter."""
    switch = switch_of(worker)
    if switch is None:
        alone = getattr(worker, ALONE, None)
        return {} if alone is None else {"graphs": [asdict(alone)]}
    return {"depth": worker.speculative_num_steps, "graphs": [asdict(g) for g in switch.captured.values()]}


def force_depth(scheduler: Any, depth: int) -> None:
    """`depth` FREE gives the choice back to the selector."""
    switch = switch_of(scheduler.draft_worker)
    if switch is None or depth not in (FREE, *switch.captured):
        raise ConfigError(f"depth {depth} is not among the captured ones: see rollout.engine.graphs")
    switch.decider.force(None if depth == FREE else depth)


def take_spans(scheduler: Any) -> str:
    """As JSON; empty for an engine that keeps its strategy."""
    switch = switch_of(scheduler.draft_worker)
    return json.dumps([asdict(s) for s in switch.decider.take_spans()] if switch else [])


def tell_learned(scheduler: Any) -> str:
    """What the selector has learned, as JSON; null for an engine that keeps its strategy."""
    switch = switch_of(scheduler.draft_worker)
    state = switch.decider.selector_state(switch.place) if switch else None
    return json.dumps(None if state is None else asdict(state))


def restore_learned(scheduler: Any, state: str) -> str:
    """Whether the selector goes on from there, as JSON."""
    switch = switch_of(scheduler.draft_worker)
    fits = switch is not None and switch.decider.restore_selector(SelectorState(**json.loads(state)), switch.place)
    return json.dumps(fits)
