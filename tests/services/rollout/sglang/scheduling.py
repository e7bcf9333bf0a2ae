"""SGLang 0.5.17's scheduler process as far as switching touches it: the EAGLE worker with its adaptive controller, over
the graphs of `graphing`, and the loop that launches a batch before it reads the last one's results.

Each part takes, checks and mutates what the real one does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.services.rollout.sglang.graphing import (
    SRT,
    EagleDraftWorker,
    Graphs,
    Memory,
    ModelRunner,
    ServerArgs,
    hooked,
)

WORKER = f"{SRT}.speculative.eagle_worker_v2.EAGLEWorkerV2"
RESULTS = f"{SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
SCHEDULER = f"{SRT}.managers.scheduler.Scheduler"
VOCAB = 7


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
