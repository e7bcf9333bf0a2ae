"""The few names of SGLang 0.5.17 that the plug-in and the launcher import, as small real objects in `sys.modules`.

Fields, call styles and hook semantics are SGLang's; a keyword that it does not know is an error here too.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

# ------------------------------------------------------------------ sglang.srt.plugins.hook_registry


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    hooks: dict[str, tuple[Callable[..., Any], HookType]] = {}  # noqa: RUF012 - one registry, as in SGLang

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER) -> None:
        assert target not in cls.hooks
        cls.hooks[target] = (hook, hook_type)

    @classmethod
    def hooked(cls, target: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original` as it stands after SGLang has applied the hook."""
        hook, hook_type = cls.hooks[target]

        def around(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        def before(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return original(*args, **kwargs)

        def after(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            return result if changed is None else changed

        return {HookType.AROUND: around, HookType.BEFORE: before, HookType.AFTER: after}[hook_type]


# ------------------------------------------------------------------ sglang.srt.utils


class MultiprocessingSerializer:
    @staticmethod
    def serialize(value: Any, output_str: bool = False) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    @staticmethod
    def deserialize(data: bytes) -> Any:
        return torch.load(io.BytesIO(data))


# ------------------------------------------------------------------ sglang.srt.managers.io_struct


@dataclass(kw_only=True)
class GenerateReqInput:
    """A batch."""

    rid: list[str]
    input_ids: list[list[int]]
    sampling_params: list[dict[str, Any]]
    return_logprob: bool | list[bool] = False
    stream: bool = False
    extra_key: str | list[str] | None = None

    def normalize_batch_and_arguments(self) -> None:
        """What is given once holds for all."""
        count = len(self.input_ids)
        if isinstance(self.return_logprob, bool):
            self.return_logprob = [self.return_logprob] * count
        if isinstance(self.extra_key, str):
            self.extra_key = [self.extra_key] * count
        if not count or len(set(self.rid)) != count:
            raise ValueError("input_ids cannot be empty, and each needs a rid of its own")
        for given in (self.rid, self.sampling_params, self.return_logprob, self.extra_key):
            if given is not None and (not isinstance(given, list) or len(given) != count):
                raise ValueError(f"{given} does not go with {count} lists of input_ids")


@dataclass(kw_only=True)
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclass(kw_only=True)
class ContinueGenerationReqInput:
    torch_empty_cache: bool = True


@dataclass(kw_only=True)
class UpdateWeightsFromTensorReqInput:
    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    disable_draft_model: bool | None = None
    torch_empty_cache: bool = False


@dataclass(kw_only=True)
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass(kw_only=True)
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass(kw_only=True)
class RpcReqInput:
    method: str
    parameters: dict[str, bool | int | float | str | None] | None = None


@dataclass(kw_only=True)
class RpcReqOutput:
    success: bool
    message: str


def sock_send(socket: Any, message: Any, flags: int = 0) -> None:
    socket.send(message)


def sock_recv(socket: Any, flags: int = 0) -> Any:
    return socket.recv()


@dataclass
class EvictParams:
    num_tokens: int = 0
    swa_num_tokens: int = 0
    mamba_num: int = 0


# ------------------------------------------------------------------ processes' objects


def worker_of(model: Any, rank: int = 0) -> SimpleNamespace:
    """A TpModelWorker."""
    return SimpleNamespace(ps=SimpleNamespace(tp_rank=rank), model_runner=SimpleNamespace(model=model))


class Algorithm(Enum):
    EAGLE = "eagle"
    EAGLE3 = "eagle3"

    def is_eagle3(self) -> bool:
        return self is Algorithm.EAGLE3


def draft_worker_of(
    model: Any, rank: int = 0, target: Any = None, algorithm: Algorithm = Algorithm.EAGLE
) -> SimpleNamespace:
    """An EAGLEWorkerV2 with its EagleDraftWorker; without a model an NGRAMWorker, whose `draft_worker` is None."""
    ps = SimpleNamespace(tp_rank=rank)
    inner = SimpleNamespace(
        draft_runner=SimpleNamespace(model=model),
        target_worker=worker_of(target, rank),
        speculative_algorithm=algorithm,
        device="cpu",
        ps=ps,
    )
    return SimpleNamespace(ps=ps, draft_worker=None if model is None else inner)


@dataclass
class Cache:
    """A radix cache by its sizes: tokens of finished requests, and of requests that run."""

    evictable: int = 0
    protected: int = 0

    def evict(self, params: EvictParams) -> None:
        self.evictable -= min(self.evictable, params.num_tokens)

    def evictable_size(self) -> int:
        return self.evictable

    def protected_size(self) -> int:
        return self.protected

    def reset(self) -> None:
        self.evictable = self.protected = 0


class Batch(list[str]):
    def is_empty(self) -> bool:
        return not self


@dataclass
class Scheduler:
    """What the hooks look at."""

    tp_worker: Any = None
    draft_worker: Any = None
    tree_cache: Cache = field(default_factory=Cache)
    running_batch: Batch = field(default_factory=Batch)
    waiting_queue: list[str] = field(default_factory=list)
    _engine_paused: bool = False
    emptied: list[bool] = field(default_factory=list)

    def is_fully_idle(self) -> bool:
        return not self.running_batch and not self.waiting_queue

    def flush_cache(self, empty_cache: bool = True) -> bool:
        if not self.is_fully_idle():
            return False
        self.tree_cache.reset()
        self.emptied.append(empty_cache)
        return True

    def handle_rpc_request(self, request: RpcReqInput) -> RpcReqOutput:
        try:
            getattr(self, request.method)(**(request.parameters or {}))
        except Exception as error:  # noqa: BLE001 - as SGLang does
            return RpcReqOutput(success=False, message=str(error))
        return RpcReqOutput(success=True, message="")

    def get_internal_state(self, request: Any) -> SimpleNamespace:
        return SimpleNamespace(internal_state={"last_gen_throughput": 1.0})


# ------------------------------------------------------------------ installation

MODULES: dict[str, tuple[Any, ...]] = {
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.plugins": (),
    "sglang.srt.plugins.hook_registry": (HookRegistry, HookType),
    "sglang.srt.utils": (MultiprocessingSerializer,),
    "sglang.srt.utils.common": (MultiprocessingSerializer,),
    "sglang.srt.utils.patch_torch": (),
    "sglang.srt.mem_cache": (),
    "sglang.srt.mem_cache.base_prefix_cache": (EvictParams,),
    "sglang.srt.managers": (),
    "sglang.srt.managers.io_struct": (
        GenerateReqInput, PauseGenerationReqInput, ContinueGenerationReqInput, UpdateWeightsFromTensorReqInput,
        ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput, RpcReqInput, RpcReqOutput,
        sock_send, sock_recv,
    ),
}  # fmt: skip


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """Where imports find it, for one test."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Put the stand-ins where imports find them, for one test."""
    HookRegistry.hooks.clear()
    modules = {
        name: put_module(monkeypatch, name, **{member.__name__: member for member in members})
        for name, members in MODULES.items()
    }
    vars(modules["sglang.srt.utils.patch_torch"])["monkey_patch_torch_reductions"] = lambda: None
    modules["sglang"].__version__ = "0.5.17"  # type: ignore[attr-defined]
    return modules
