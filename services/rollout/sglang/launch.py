"""Talking to a stock SGLang engine (`start` starts it).

The engine's event loop runs in a thread of its own; every call is a coroutine handed over to it and waited for with a
time-out. SGLang's own blocking methods would run that loop in the caller's thread, one call at a time.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.core.errors import BatchError, ConfigError, WaitTimeoutError, WeightError
from services.core.selector import SelectorState
from services.core.types import ServedVersions, StrategySpan
from services.rollout.sglang.arguments import sampling_arguments
from services.rollout.sglang.bundle import bundled
from services.rollout.sglang.capture import KEEP
from services.rollout.sglang.captured import CapturedStates, capture_file, read_capture
from services.rollout.sglang.graphs import CapturedGraphs
from services.rollout.sglang.handle import Asked, Kind, Update
from services.rollout.sglang.loader import PART_BYTES, LoadOrder, serve_parts
from services.rollout.sglang.plugin import (
    CAPTURE_STATES,
    FORCE_DEPTH,
    HISTOGRAM_KEY,
    PLUGIN_NAME,
    RESTORE_LEARNED,
    STATE_KEY,
    TAKE_SPANS,
    TAKE_STATES,
    TELL_LEARNED,
)
from services.rollout.sglang.switching import FREE
from services.weights.parts import Incoming, NamedTensors

T = TypeVar("T")


class SGLangHandle:
    """One engine. `server` names it in messages; tensors go over on `device`, in parts of about `part_bytes`."""

    def __init__(
        self,
        engine: Any,
        server: str,
        tp: int,
        deterministic: bool,
        call_timeout_s: float,
        device: str = "cuda",
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._engine, self._server, self._tp = engine, server, tp
        self._device, self._part_bytes = torch.device(device), part_bytes
        self._deterministic, self._timeout_s = deterministic, call_timeout_s
        self._manager = engine.tokenizer_manager
        self._news: dict[str, Update] = {}
        self._changed = threading.Condition()
        self._live: set[asyncio.Task[None]] = set()  # touched by the loop's thread only
        self._thread = threading.Thread(target=engine.loop.run_forever, name=f"{server}-sglang", daemon=True)
        self._thread.start()

    # -- requests

    def submit(self, asked: Sequence[Asked]) -> None:
        """SGLang's scheduler hears of one batch in one message. A batch is of one window: SGLang gives a batch its
        cache key as a whole or one text for each, and to have none is another key than to have an empty one."""
        for window in dict.fromkeys(one.window for one in asked):
            batch = [one for one in asked if one.window == window]
            under_way = {one.rid: Update(one.rid, (), ()) for one in batch}
            self._engine.loop.call_soon_threadsafe(self._begin, self._request(batch, window), under_way)

    def _request(self, batch: Sequence[Asked], window: int | None) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=[one.rid for one in batch],
            input_ids=[list(one.prompt_ids) for one in batch],
            sampling_params=[sampling_arguments(one.sampling, one.seed, self._deterministic) for one in batch],
            return_logprob=True,
            stream=True,
            extra_key=None if window is None else f"{KEEP}{window}",
        )

    def _begin(self, request: Any, under_way: dict[str, Update]) -> None:
        task = self._engine.loop.create_task(self._follow(request, under_way))
        self._live.add(task)
        task.add_done_callback(lambda done: self._ended(under_way, done))

    def _ended(self, under_way: dict[str, Update], task: asyncio.Task[None]) -> None:
        self._live.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        for rid in under_way:  # whatever it was: nobody else would ever hear of these requests again
            self._tell(Update(rid, (), (), finish="abort", message=f"{type(error).__name__}: {error}"))
        for rid in under_way:  # the error may be one request's; the others would run on unseen
            self._manager.abort_request(rid=rid)

    async def _follow(self, request: Any, under_way: dict[str, Update]) -> None:
        """`under_way`: what was told last of each request that has not ended."""
        async for chunk in self._manager.generate_request(request, None):
            rid = chunk["meta_info"]["id"]
            under_way[rid] = news = updated(under_way[rid], chunk)
            self._tell(news)
            if news.finish is not None:
                del under_way[rid]

    def _tell(self, update: Update) -> None:
        with self._changed:
            self._news[update.rid] = update  # the newest says everything
            self._changed.notify()

    def poll(self, wait_s: float) -> list[Update]:
        with self._changed:
            if not self._news:
                self._changed.wait(wait_s)
            news, self._news = list(self._news.values()), {}
        return news

    def abort(self, rid: str) -> None:
        self._engine.loop.call_soon_threadsafe(lambda: self._manager.abort_request(rid=rid))

    def abort_all(self) -> None:
        self._call(self._abort_all(), "dropping all requests")
        with self._changed:
            self._news.clear()

    async def _abort_all(self) -> None:
        while self._live:
            self._manager.abort_request(abort_all=True)
            await asyncio.wait(self._live, timeout=0.5)

    # -- weights

    def load(self, kind: Kind, version: int, tensors: Mapping[str, Tensor]) -> None:
        parts = serve_parts(tensors, self._part_bytes)
        self._call(self._load(kind, version, iter(parts), len(parts)), f"loading {kind} version {version}")

    def receive(self, version: int, incoming: Incoming) -> None:
        parts = incoming.parts()
        begun = chain(iter([next(parts)]), parts)  # nothing is held as long as nothing comes
        work = self._load("policy", version, begun, incoming.num_parts)
        self._call(work, f"loading policy version {version}")

    async def _load(self, kind: Kind, version: int, parts: Iterator[NamedTensors], count: int) -> None:
        """A policy retracts what runs (keys and values are computed anew), a drafter only holds it for the moment. Also
        when nothing runs as far as this side knows: a last batch under way would make SGLang's flush fail."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        mode = "retract" if kind == "policy" else "in_place"
        try:
            await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))
            for i in range(count):
                # In a thread, because it may still be on its way; without a name, because a name would keep it alive.
                await self._send(LoadOrder(kind, version, i, count), await asyncio.to_thread(next, parts))
        finally:  # a pause without its continue would leave every request waiting for ever (row 34)
            await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def _send(self, order: LoadOrder, part: NamedTensors) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        moved = [(name, tensor.to(self._device, non_blocking=True)) for name, tensor in part]
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        # Each rank opens the memory itself: a payload is good for one reader.
        payloads = [MultiprocessingSerializer.serialize(bundled(moved)) for _ in range(self._tp)]
        ok, message = await self._manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads,
                load_format=order.text(),
                flush_cache=order.kind == "policy" and order.last,  # its prefixes are the old policy's
                disable_draft_model=order.kind == "policy",
            ),
            None,
        )
        if not ok:
            raise WeightError(message)

    # -- memory

    def switch_memory(self, release: bool) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

        if release:
            work = self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(), None)
        else:
            work = self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)
        self._call(work, "releasing its memory" if release else "resuming its memory")

    # -- hidden states

    def capture_states(self, limit_bytes: int) -> None:
        refused = self._ask_scheduler(CAPTURE_STATES, "setting memory aside for hidden states", limit_bytes=limit_bytes)
        if refused:
            raise ConfigError(f"{self._server}: {refused}")

    def take_states(self) -> CapturedStates:
        with capture_file() as (path, descriptor):
            refused = self._ask_scheduler(TAKE_STATES, "handing over the hidden states", path=path)
            if refused:
                raise BatchError(
                    f"{self._server}: SGLang could not hand over the hidden states: {refused}; they pass through "
                    f"{path}: give it more room, lower rollout.engine.capture_bytes, or set drafter.states: policy"
                )
            return read_capture(descriptor)

    # -- strategies

    def force_depth(self, depth: int | None) -> None:
        refused = self._ask_scheduler(FORCE_DEPTH, "fixing the strategy", depth=FREE if depth is None else depth)
        if refused:
            raise ConfigError(f"{self._server}: {refused}")

    def take_spans(self) -> tuple[StrategySpan, ...]:
        answer = self._call_scheduler(TAKE_SPANS, "the choice of strategies")
        if not answer.success:
            raise BatchError(f"{self._server}: SGLang could not tell which strategies ran: {answer.message}")
        return tuple(StrategySpan(**span) for span in json.loads(answer.message))

    def selector_state(self) -> SelectorState | None:
        told = self._learned(TELL_LEARNED, "what its selector has learned")
        return None if told is None else SelectorState(**told)

    def restore_selector(self, state: SelectorState) -> bool:
        return bool(self._learned(RESTORE_LEARNED, "restoring its selector", state=json.dumps(asdict(state))))

    def _learned(self, method: str, what: str, **parameters: str) -> Any:
        answer = self._call_scheduler(method, what, **parameters)
        if not answer.success:
            raise BatchError(f"{self._server}: SGLang refused {what}: {answer.message}; see its log")
        return json.loads(answer.message)

    def graphs(self) -> tuple[CapturedGraphs, ...]:
        """What the graphs of each depth took; empty without a drafter."""
        return tuple(CapturedGraphs(**told) for told in self._state("the memory of its graphs").get("graphs", ()))

    def _ask_scheduler(self, method: str, what: str, **parameters: int | str) -> str:
        """Call a method of every scheduler process; returns why it failed, or nothing."""
        answer = self._call_scheduler(method, what, **parameters)
        return "" if answer.success else str(answer.message)

    def _call_scheduler(self, method: str, what: str, **parameters: int | str) -> Any:
        """What `Engine.collective_rpc` does, which would wait for ever."""
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        socket = self._engine.send_to_rpc
        while socket.poll(0):
            sock_recv(socket)  # the answer of a call that had timed out
        sock_send(socket, RpcReqInput(method=method, parameters=parameters))
        if not socket.poll(int(1000 * self._timeout_s)):
            raise self._too_late(what)
        return sock_recv(socket)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return int(free)

    def served(self) -> ServedVersions:
        told = self._state("the served versions")
        return ServedVersions(told["policy"], told["drafter"])

    def _state(self, what: str) -> Mapping[str, Any]:
        states = self._call(self._manager.get_internal_state(), what)
        told: Mapping[str, Any] | None = states[0].get(STATE_KEY)
        if told is None:
            raise ConfigError(f"{self._server}: SGLang runs without the {PLUGIN_NAME!r} plug-in: see its log")
        return told

    # -- life

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._engine.loop)
        self._thread.join(timeout=5.0)
        self._engine.shutdown()

    async def _stop(self) -> None:
        """A cancelled task takes some turns of the loop to end: SGLang then cancels what waits for each request."""
        for task in self._live:
            task.cancel()
        await asyncio.gather(*self._live, return_exceptions=True)
        self._engine.loop.stop()

    def _call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._engine.loop)
        try:
            return future.result(self._timeout_s)
        except FutureTimeoutError:
            future.cancel()
            raise self._too_late(what) from None

    def _too_late(self, what: str) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"{self._server}: SGLang did not finish {what} within {self._timeout_s:.0f} s: see its log, or raise "
            "coordinator.call_timeout_s"
        )


def updated(told: Update, chunk: Mapping[str, Any]) -> Update:
    """`told` with what SGLang has added since. A chunk has everything since the start; of the entries of its logprobs
    only the new ones are looked at, or every piece of a long response would cost as much as all before. The tokens of
    an aborted request, which may be fewer than were told, are nobody's."""
    meta = chunk["meta_info"]
    reason = meta.get("finish_reason")
    ids, entries = chunk["output_ids"], meta.get("output_token_logprobs") or ()
    return Update(
        rid=told.rid,
        response_ids=tuple(ids),
        logprobs=(*told.logprobs, *(entry[0] for entry in entries[len(told.logprobs) :])),
        histogram=tuple(meta.get(HISTOGRAM_KEY) or ()),
        finish=None if reason is None else reason["type"],
        message="" if reason is None else str(reason.get("message") or ""),
    )
