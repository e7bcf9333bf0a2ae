"""CUDA graphs in SGLang 0.5.17's scheduler process, as far as the plug-in touches them: the start arguments, the
runners that capture, what they find free in memory, and the draft worker.

Graph runners look at the start arguments, not at the overrides; the logits buffer has the rows that the model runner
asks for; arguments are read-only after the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.services.rollout.sglang.standins import HookRegistry, put_module

SRT = "sglang.srt"


def hooked(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return HookRegistry.hooked(target, original)


class ServerArgs:
    def __init__(
        self, steps: int, sizes: list[int], config_file: str | None, adaptive: bool = True, attention: str = "triton"
    ) -> None:
        decode = SimpleNamespace(bs=sizes, max_bs=max(sizes))
        self.cuda_graph_config = SimpleNamespace(decode=decode)
        self.attention_backend = attention
        self.speculative_num_steps, self.speculative_num_draft_tokens = steps, steps + 1
        self.speculative_adaptive, self.speculative_adaptive_config = adaptive, config_file
        self._declarations_materialized = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and getattr(self, "_declarations_materialized", False):
            raise AttributeError(f"server_args.{name} assigned after resolution; server_args is read-only")
        object.__setattr__(self, name, value)


class GroupCoordinator:
    """The ranks that share a model: they capture together. A context of before stands for whoever brings one."""

    device_module = SimpleNamespace(Stream=object)

    @contextmanager
    def graph_capture(self, graph_capture_context: Any = None, stream: Any = None) -> Iterator[Any]:
        yield graph_capture_context or SimpleNamespace(stream=stream or self.device_module.Stream())


def graph_capture(stream: Any = None) -> Any:
    """As graph runners call it."""
    return hooked(f"{SRT}.distributed.parallel_state.GroupCoordinator.graph_capture", GroupCoordinator.graph_capture)(
        GroupCoordinator(), stream=stream
    )


class Memory:
    """The pool of all graphs: what one uses between its kernels is free for those captured after it on its stream, what
    it leaves behind is not."""

    def __init__(self) -> None:
        self._free: dict[object, list[int]] = {}
        self._blocks = 0

    def capture(self, stream: object) -> tuple[int, set[int]]:
        """(the block with the results, those used on the way)."""
        results, *used = (self._take(stream) for _ in range(4))
        self._free.setdefault(stream, []).extend(used)
        return results, {results, *used}

    def _take(self, stream: object) -> int:
        if free := self._free.get(stream):
            return free.pop()
        self._blocks += 1
        return self._blocks


class Graphs:
    """A graph runner: what it captured when it was made, on which stream, and where its results and its work lie."""

    def __init__(self, runner: ModelRunner, width: int) -> None:
        self.sizes, self.width = list(runner.server_args.cuda_graph_config.decode.bs), width
        with graph_capture() as context:
            self.stream = context.stream
            self.results, self.used = runner.memory.capture(self.stream)
        rows = max(self.sizes) * width
        assert rows <= runner.logits_rows, f"the logits buffer holds {runner.logits_rows} rows, {rows} are needed"


class ModelRunner:
    def __init__(self, server_args: ServerArgs, memory: Memory) -> None:
        self.server_args, self.tp_group = server_args, SimpleNamespace(ranks=[0], cpu_group=None)
        self.memory = memory
        self.model = SimpleNamespace()
        self.logits_rows = 0

    def max_decode_logits_rows(self) -> int:
        return max(self.server_args.cuda_graph_config.decode.bs) * self.server_args.speculative_num_draft_tokens

    def make_logits_buffer(self) -> None:
        rows = hooked(
            f"{SRT}.model_executor.model_runner.ModelRunner.max_decode_logits_rows", type(self).max_decode_logits_rows
        )
        self.logits_rows = max(self.logits_rows, rows(self))


# What decides over the drafter's graphs: `decode` is the backend of graphs, `catching_up` false where the variable
# SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH is set.
GRAPHS = SimpleNamespace(decode="full", catching_up=True)


class Phase:
    DECODE = "decode"


class Backend:
    DISABLED = "disabled"


def check_cuda_graph_backend(phase: str, backend: str) -> bool:
    return bool(getattr(GRAPHS, phase) == backend)


envs = SimpleNamespace(SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH=SimpleNamespace(get=lambda: not GRAPHS.catching_up))


class TritonAttnBackend:
    pass


class FlashAttentionBackend:
    pass


class EAGLEDraftExtendCudaGraphRunner(Graphs):
    """Of the catching up, which takes its width from the start arguments."""

    def __init__(self, worker: EagleDraftWorker) -> None:
        super().__init__(worker.draft_runner, worker.draft_runner.server_args.speculative_num_draft_tokens)


class EagleDraftWorker:
    def __init__(self, draft_runner: ModelRunner) -> None:
        self.draft_runner = draft_runner
        flash = draft_runner.server_args.attention_backend == "fa3"
        self.draft_extend_attn_backend = FlashAttentionBackend() if flash else TritonAttnBackend()
        self.cuda_graph_runner: Graphs | None = None
        self.cuda_graph_runner_for_draft_extend: Graphs | None = None

    def _capture_cuda_graphs(self) -> None:
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None
        if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            return
        self.cuda_graph_runner = Graphs(self.draft_runner, 1)
        if isinstance(self.draft_extend_attn_backend, TritonAttnBackend) and GRAPHS.catching_up:
            self.cuda_graph_runner_for_draft_extend = EAGLEDraftExtendCudaGraphRunner(self)


def install_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plug-in looks for what it needs to capture graphs itself, for one test."""
    members: dict[str, dict[str, Any]] = {
        "environ": {"envs": envs},
        "model_executor": {},
        "model_executor.cuda_graph_config": {
            "Backend": Backend, "Phase": Phase, "check_cuda_graph_backend": check_cuda_graph_backend,
        },
        "speculative": {},
        "speculative.eagle_draft_extend_cuda_graph_runner": {
            "EAGLEDraftExtendCudaGraphRunner": EAGLEDraftExtendCudaGraphRunner,
        },
    }  # fmt: skip
    for name, values in members.items():
        put_module(monkeypatch, f"{SRT}.{name}", **values)
