"""An engine object with SGLang's tokenizer manager as the launcher sees it: coroutines on one event loop, requests that
stream cumulative chunks, pause and continue, weight updates that go through the plug-in's own hooks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from services.rollout.sglang.handle import Kind
from services.rollout.sglang.plugin import _add_versions, _answer_rpc, _load_draft, _load_target
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.sglang.standins import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    RpcReqInput,
    RpcReqOutput,
    Scheduler,
    UpdateWeightsFromTensorReqInput,
    draft_worker_of,
    worker_of,
)

MODEL = tiny_model("llama", 32, 0, 2.0)
Chunk = dict[str, Any] | Exception
POLICY, DRAFTER = tensors_of(MODEL), random_drafter(spec_of(MODEL))


@dataclass
class Trouble:
    """What goes wrong from now on. `hang`: a call that never answers."""

    hang: str = ""
    update_error: Exception | None = None
    generate_error: Exception | None = None
    deaf: bool = False  # aborts are not heard
    plugin: bool = True


@dataclass
class Manager:
    """`calls`: what was asked, in order; an update is noted with whether generation was paused."""

    models: dict[Kind, Any]
    trouble: Trouble = field(default_factory=Trouble)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    requests: list[GenerateReqInput] = field(default_factory=list)
    chunks: dict[str, asyncio.Queue[Chunk]] = field(default_factory=dict)
    paused: bool = False

    async def generate_request(self, obj: GenerateReqInput, request: None) -> AsyncIterator[dict[str, Any]]:
        """One stream for a batch: the next chunk of whichever request has one, until all have ended or one fails."""
        if self.trouble.generate_error is not None:
            raise self.trouble.generate_error
        obj.normalize_batch_and_arguments()
        assert not self.known.intersection(obj.rid)
        self.requests.append(obj)
        for rid in obj.rid:
            self.chunks.setdefault(rid, asyncio.Queue())
        ones = [self._stream(rid) for rid in obj.rid]
        coming = {asyncio.ensure_future(anext(one)): one for one in ones}
        try:
            while coming:
                done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    one = coming.pop(task)
                    if isinstance(task.exception(), StopAsyncIteration):
                        continue
                    yield task.result()
                    coming[asyncio.ensure_future(anext(one))] = one
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    async def _stream(self, rid: str) -> AsyncIterator[dict[str, Any]]:
        finished = False
        while not finished:
            chunk = await self.chunks[rid].get()
            if isinstance(chunk, Exception):
                raise chunk
            chunk["meta_info"]["id"] = rid
            yield chunk
            finished = chunk["meta_info"]["finish_reason"] is not None
        del self.chunks[rid]

    @property
    def known(self) -> set[str]:
        return {rid for request in self.requests for rid in request.rid}

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.calls.append(("abort", "*" if abort_all else rid))
        if self.trouble.deaf:
            return
        for known, queue in self.chunks.items():
            if abort_all or known.startswith(rid):
                queue.put_nowait(chunk_of([], {"type": "abort", "message": "Aborted"}))

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        self.calls.append(("pause", obj.mode))
        self.paused = True
        await self._maybe_hang("pause")

    async def continue_generation(self, obj: ContinueGenerationReqInput) -> None:
        assert not obj.torch_empty_cache
        self.calls.append(("continue",))
        self.paused = False

    async def update_weights_from_tensor(self, obj: UpdateWeightsFromTensorReqInput, request: None) -> tuple[bool, str]:
        self.calls.append(("update", obj.load_format, obj.flush_cache, self.paused))
        await self._maybe_hang("update")
        if self.trouble.update_error is not None:
            raise self.trouble.update_error
        # SGLang's scheduler: the target's worker alone when the draft is switched off, otherwise the draft's
        if obj.disable_draft_model:
            return _load_target(lambda *_: (False, "stock"), worker_of(self.models["policy"]), obj)
        return _load_draft(lambda *_: (False, "stock"), draft_worker_of(self.models["drafter"]), obj)

    async def get_internal_state(self) -> list[dict[str, Any]]:
        await self._maybe_hang("state")
        scheduler = Scheduler(worker_of(self.models["policy"]), draft_worker_of(self.models["drafter"]))
        result = scheduler.get_internal_state(None)
        return [_add_versions(result, scheduler, None).internal_state if self.trouble.plugin else result.internal_state]

    async def release_memory_occupation(self, obj: Any, request: None) -> None:
        self.calls.append(("release", obj.tags))
        await self._maybe_hang("release")

    async def resume_memory_occupation(self, obj: Any, request: None) -> None:
        self.calls.append(("resume", obj.tags))

    async def _maybe_hang(self, call: str) -> None:
        if self.trouble.hang == call:
            await asyncio.Event().wait()


class RpcSocket:
    """The socket on which `Engine` calls its scheduler's methods."""

    def __init__(self, scheduler: Scheduler, trouble: Trouble) -> None:
        self.scheduler, self._trouble = scheduler, trouble
        self.answers: list[RpcReqOutput] = []

    def send(self, message: RpcReqInput) -> None:
        answer = _answer_rpc(Scheduler.handle_rpc_request, self.scheduler, message)
        if self._trouble.hang != "rpc":
            self.answers.append(answer)

    def poll(self, timeout_ms: float) -> int:
        return len(self.answers)

    def recv(self) -> RpcReqOutput:
        return self.answers.pop(0)


class Engine:
    """`sglang.Engine` as started."""

    def __init__(self, models: dict[Kind, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = manager = Manager(models)
        draft = draft_worker_of(models["drafter"], target=models["policy"])
        self.send_to_rpc = RpcSocket(Scheduler(worker_of(models["policy"]), draft), manager.trouble)
        self.shut_down = False

    def say(self, rid: str, chunk: Chunk) -> None:
        """The scheduler has news of a request, or what it says fails; returns when the manager knows them."""

        async def put() -> None:
            manager = self.tokenizer_manager
            manager.chunks.setdefault(rid, asyncio.Queue()).put_nowait(chunk)

        asyncio.run_coroutine_threadsafe(put(), self.loop).result(60)

    def shutdown(self) -> None:
        self.shut_down = True


def chunk_of(
    ids: list[int], reason: dict[str, Any] | None = None, histogram: list[int] | None = None
) -> dict[str, Any]:
    """All of a response so far, with a logprob of -id / 10 for each token."""
    meta: dict[str, Any] = {
        "finish_reason": reason,
        "output_token_logprobs": [(-i / 10, i, None) for i in ids],
        "completion_tokens": len(ids),
    }
    if histogram is not None:
        meta["spec_correct_drafts_histogram"] = histogram
    return {"output_ids": ids, "meta_info": meta}
