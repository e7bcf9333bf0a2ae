"""SGLang 0.5.17's scheduler process as far as switching touches it: arguments, graph runners, the EAGLE worker with its
adaptive controller, and the loop that launches a batch before it reads the last one's results.

Each part takes, checks and mutates what the real one does. Graph runners look at the start arguments, not at the
overrides; the logits buffer has the rows that the model runner asks for; arguments are read-only after the start.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.services.rollout.sglang.standins import HookRegistry

SRT = "sglang.srt"
WORKER = f"{SRT}.speculative.eagle_worker_v2.EAGLEWorkerV2"
RESULTS = f"{SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
SCHEDULER = f"{SRT}.managers.scheduler.Scheduler"
RUNNER = f"{SRT}.model_executor.model_runner.ModelRunner"
VOCAB = 7


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


@dataclass
class State:
    """A SpecRuntimeState: graphs of the draft, the verification and the drafter's catching up."""

    speculative_num_steps: int
    draft: Graphs
    target: Graphs
    extend: Graphs | None


class AdaptiveController:
    def __init__(self, worker: EagleWorker) -> None:
        self.worker, self._states = worker, dict[int, State]()

    def register(self, state: State, steps: int | None = None) -> None:
        self._states[state.speculative_num_steps if steps is None else steps] = state

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        raise AssertionError("SGLang's own choice of graphs")

    def _activate(self, steps: int) -> None:
        self.worker.apply_runtime_state(self._states[steps])


@dataclass
class Request:
    prompt: int
    budget: int
    stop_at: int | None = None  # a stop lies there
    output_ids: list[int] = field(default_factory=list)
    finished_len: int | None = None
    is_retracted: bool = False
    spec_correct_drafts_histogram: list[int] = field(default_factory=list)
    sampling_params: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(temperature=0.5, top_k=1 << 30))

    @property
    def origin_input_ids(self) -> range:
        return range(self.prompt)

    def finished(self) -> bool:
        return self.finished_len is not None

    def update_finish_state(self) -> None:
        for end in (self.stop_at, self.budget):
            if end is not None and len(self.output_ids) >= end and not self.finished():
                self.finished_len = end


@dataclass
class Mode:
    extend: bool = False

    def is_extend(self) -> bool:
        return self.extend

    def is_idle(self) -> bool:
        return False


@dataclass
class Batch:
    reqs: list[Request]
    forward_mode: Mode
    spec_info: Any = None
    is_extend_in_batch: bool = False


@dataclass
class Result:
    """A GenerationBatchResult."""

    accept_lens: list[int]
    speculative_num_draft_tokens: int | None
    copy_done: Any = None
    num_correct_drafts_per_req_cpu: list[int] | None = None


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
        "layers": {},
        "layers.attention": {},
        "layers.attention.flashattention_backend": {"FlashAttentionBackend": FlashAttentionBackend},
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
        module = ModuleType(f"{SRT}.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)


class EagleWorker:
    """EAGLEWorkerV2. A draft is accepted with probability 0.7. `probs`: sampled drafts, [B,V] of the first one."""

    def __init__(self, server_args: ServerArgs, target_args: ServerArgs, probs: bool, seed: int = 0) -> None:
        self.server_args, self._rng, self._probs = server_args, random.Random(seed), probs
        memory = Memory()
        self.target_worker = SimpleNamespace(model_runner=ModelRunner(target_args, memory))
        self.draft_runner = ModelRunner(server_args, memory)
        self.draft_worker = EagleDraftWorker(self.draft_runner)
        self.speculative_num_steps = server_args.speculative_num_steps
        self.ps = SimpleNamespace(tp_rank=0, tp_size=1)
        self.adaptive_controller = AdaptiveController(self)
        self.state: State | None = None
        self.overrides: list[tuple[str, dict[str, int]]] = []

    def init_cuda_graphs(self) -> None:
        self.target_worker.model_runner.make_logits_buffer()
        self.draft_runner.make_logits_buffer()
        target = Graphs(self.target_worker.model_runner, self.speculative_num_steps + 1)
        self.state = State(self.speculative_num_steps, *self._drafting(target))
        self.adaptive_controller.register(self.state)
        name = f"{SRT}.speculative.adaptive_runtime_state.AdaptiveController.init_states"
        hooked(name, AdaptiveController.init_states)(self.adaptive_controller, cuda_graph_bs=None)

    def _drafting(self, target: Graphs | None = None) -> tuple[Graphs, Graphs, Graphs | None]:
        """The graphs of a depth; the first one's verification has been captured before its draft."""
        name = f"{SRT}.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs"
        hooked(name, EagleDraftWorker._capture_cuda_graphs)(self.draft_worker)
        draft, extend = self.draft_worker.cuda_graph_runner, self.draft_worker.cuda_graph_runner_for_draft_extend
        assert draft is not None
        width = self.server_args.speculative_num_draft_tokens
        return draft, target or Graphs(self.target_worker.model_runner, width), extend

    def build_adaptive_runtime_state(
        self, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: list[int] | None = None
    ) -> State:
        assert speculative_num_draft_tokens == speculative_num_steps + 1
        return State(speculative_num_steps, *self._drafting())

    def apply_runtime_state(self, state: State) -> None:
        self.speculative_num_steps, self.state = state.speculative_num_steps, state
        self.overrides.append(("adaptive_spec.restore", {"speculative_num_steps": state.speculative_num_steps}))

    def activate_step_by_batch(self, batch_size: int) -> None:
        self.adaptive_controller._activate(min(self.adaptive_controller._states))

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self.adaptive_controller._activate(max(self.adaptive_controller._states))

    def forward_batch_generation(self, batch: Batch, on_publish: Any = None, grammar_barrier: Any = None) -> Result:
        if batch.forward_mode.is_extend():
            return Result([], None)
        hooked(f"{WORKER}.activate_step_by_batch", EagleWorker.activate_step_by_batch)(self, len(batch.reqs))
        batch.spec_info = SimpleNamespace(draft_probs=torch.ones(len(batch.reqs), VOCAB) if self._probs else None)
        steps, state = self.speculative_num_steps, self.state
        assert state is not None and state.target.width == steps + 1
        assert state.extend is not None and state.extend.width == steps + 1, "the drafter catches up kernel by kernel"
        if steps == 0:
            trivial = hooked(f"{WORKER}._build_trivial_verify_input", EagleWorker._build_trivial_verify_input)(
                self, batch
            )
            self._sample(trivial.draft_probs)
        accepted = [self._accepted(steps) for _ in batch.reqs]
        return Result([1 + a for a in accepted], steps + 1)

    def _accepted(self, steps: int) -> int:
        return next((k for k in range(steps) if self._rng.random() > 0.7), steps)

    def _build_trivial_verify_input(self, batch: Batch) -> SimpleNamespace:
        return SimpleNamespace(draft_probs=None)

    def _sample(self, draft_probs: Tensor | None) -> None:
        if self._probs and (draft_probs is None or draft_probs.shape[-1] != VOCAB or draft_probs.dim() != 3):
            raise ValueError("Rejection sampling requires a target-vocab draft proposal distribution")


@dataclass
class Processor:
    """SchedulerBatchResultProcessor."""

    model_worker: EagleWorker

    def _resolve_spec_v2_tokens(self, result: Result, batch: Batch) -> list[list[int]]:
        result.num_correct_drafts_per_req_cpu = [n - 1 for n in result.accept_lens]
        tell = hooked(f"{WORKER}.on_verify_complete_cpu", EagleWorker.on_verify_complete_cpu)
        tell(self.model_worker, result.num_correct_drafts_per_req_cpu, batch_size=len(batch.reqs))
        for request, accepted in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True):
            if not (request.is_retracted or request.finished()):
                counts = request.spec_correct_drafts_histogram
                counts.extend([0] * (accepted + 1 - len(counts)))
                counts[accepted] += 1
        return [[1] * n for n in result.accept_lens]

    def process_batch_result_decode(self, batch: Batch, result: Result) -> None:
        tokens = hooked(f"{RESULTS}._resolve_spec_v2_tokens", Processor._resolve_spec_v2_tokens)(self, result, batch)
        for request, new in zip(batch.reqs, tokens, strict=True):
            if not (request.finished() or request.is_retracted):
                request.output_ids.extend(new)
                request.update_finish_state()

    def process_batch_result_prefill(self, batch: Batch, result: Result) -> None:
        for request in batch.reqs:
            request.output_ids.append(1)


class SwitchingScheduler:
    """Two copies of the arguments, as for target and drafter; `after_round` sees what has just been launched."""

    def __init__(
        self,
        steps: int,
        sizes: list[int],
        config_file: str | None,
        probs: bool,
        adaptive: bool = True,
        attention: str = "triton",
    ) -> None:
        self.server_args = ServerArgs(steps, sizes, config_file, adaptive, attention)
        drafters = ServerArgs(steps, list(sizes), config_file, adaptive, attention)
        self.draft_worker = EagleWorker(drafters, self.server_args, probs)
        self.processor, self.queue = Processor(self.draft_worker), deque[tuple[Batch, Result]]()
        self.launched: list[tuple[int, int]] = []  # running, depth

    def start(self) -> None:
        hooked(f"{SCHEDULER}.init_all_cuda_graphs", SwitchingScheduler.init_all_cuda_graphs)(self)

    def init_all_cuda_graphs(self) -> None:
        self.draft_worker.init_cuda_graphs()

    def run(self, requests: list[Request], each_round: Callable[[], None] = lambda: None) -> None:
        """Prefill, then rounds until all have ended: each launched before the one before it is read."""
        self._launch(Batch(requests, Mode(extend=True)))
        while self.queue:
            running = [r for r in requests if not r.finished()]
            if running:
                each_round()
                self._launch(Batch(running, Mode()))
            self._read()

    def _launch(self, batch: Batch) -> None:
        run = hooked(f"{WORKER}.forward_batch_generation", EagleWorker.forward_batch_generation)
        result = run(self.draft_worker, batch, on_publish=None)
        if not batch.forward_mode.is_extend():
            self.launched.append((len(batch.reqs), result.speculative_num_draft_tokens - 1))
        self.queue.append((Batch(list(batch.reqs), batch.forward_mode), result))

    def _read(self) -> None:
        batch, result = self.queue.popleft()
        kind = "prefill" if batch.forward_mode.is_extend() else "decode"
        name = f"process_batch_result_{kind}"
        hooked(f"{RESULTS}.{name}", getattr(Processor, name))(self.processor, batch, result)
