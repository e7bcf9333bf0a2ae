"""The core protocols over services in this process: no Ray, no threads, deterministic order.

A call is queued at its service and runs when somebody waits for anything, one call at a time, services taking turns.
So two rollout servers make progress side by side although only one computes at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from services.core.checkpoints import CheckpointNote
from services.core.control import refuse_tensors
from services.core.errors import LongtailError, ServiceLostError
from services.core.gain import Workload
from services.core.part import Part
from services.core.protocols import Blob, Clock, Pending
from services.core.selector import SelectorState
from services.core.types import GroupWork, HiddenStateChunk, Prompt, Rollout, TrainBatch


class LocalCall:
    """A queued call and, once run, its answer or error."""

    def __init__(self, service: LocalService, what: str, run: Callable[[], Any]) -> None:
        self._service = service
        self.what = what
        self._run = run
        self.done = False
        self.answered_s: float | None = None
        self._answer: Any = None
        self._error: LongtailError | None = None

    def execute(self) -> None:
        try:
            self._answer = self._run()
        except LongtailError as error:
            self._error = error
        self._end()

    def fail(self, error: LongtailError) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self.done, self.answered_s = True, self._service.clock()

    def result(self, timeout_s: float) -> Any:
        while not self.done:
            self._service.execute_next()
        if self._error is not None:
            raise self._error
        return self._answer


class LocalService:
    """A service with its queue of calls. `kill` and a later restart stand in for a process that dies."""

    def __init__(self, name: str, build: Callable[[], Any], host: LocalHost) -> None:
        self.name = name
        self._build = build
        self._queue: deque[LocalCall] = deque()
        self.instance: Any = build()
        self.starts = 1
        self.clock = host.clock
        host.services.append(self)

    def call(self, method: str, *args: Any) -> LocalCall:
        call = LocalCall(self, f"{self.name}.{method}", lambda: getattr(self.instance, method)(*args))
        if self.instance is None:
            call.fail(ServiceLostError(self.name, "killed"))
        else:
            self._queue.append(call)
        return call

    def run(self, what: str, action: Callable[[Any], Any]) -> LocalCall:
        """Like `call`, for something that is no plain method of the service."""
        call = LocalCall(self, f"{self.name}.{what}", lambda: action(self.instance))
        if self.instance is None:
            call.fail(ServiceLostError(self.name, "killed"))
        else:
            self._queue.append(call)
        return call

    @property
    def queued(self) -> Sequence[LocalCall]:
        return self._queue

    def execute_next(self) -> bool:
        if not self._queue:
            return False
        self._queue.popleft().execute()
        return True

    def kill(self) -> None:
        self.instance = None
        for call in self._queue:
            call.fail(ServiceLostError(self.name, "killed"))
        self._queue.clear()

    def restart(self) -> None:
        self.instance = self._build()
        self.starts += 1


class LocalHost:
    """The waiter: runs queued calls, services taking turns, until one of the awaited is done.

    `sleep` is used when nothing can run, so that timers come due.
    """

    def __init__(self, clock: Clock, sleep: Callable[[float], None]) -> None:
        self.services: list[LocalService] = []
        self.clock = clock
        self._sleep = sleep
        self._turn = 0

    def wait(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[Pending[Any]]:
        give_up_s = self.clock() + timeout_s
        while True:
            ready = [p for p in pending if p.done]  # type: ignore[attr-defined]
            left = give_up_s - self.clock()
            if ready or left <= 0:
                return ready
            if not self._run_one():
                self._sleep(left)

    def _run_one(self) -> bool:
        for _ in self.services:
            self._turn = (self._turn + 1) % len(self.services)
            if self.services[self._turn].execute_next():
                return True
        return False


class _Client:
    def __init__(self, service: LocalService) -> None:
        self._service = service

    @property
    def name(self) -> str:
        return self._service.name

    def process_id(self) -> LocalCall:
        """A number that changes with each restart, as a process id does."""
        return self._service.run("process_id", lambda _: self._service.starts)

    def _control(self, method: str, *args: Any) -> LocalCall:
        refuse_tensors(args, f"{self.name}.{method}")
        return self._service.call(method, *args)


class LocalRolloutClient(_Client):
    def open_epoch(self, epoch: int) -> LocalCall:
        return self._control("open_epoch", epoch)

    def submit(self, work: Sequence[GroupWork], epoch: int) -> LocalCall:
        return self._control("submit", work, epoch)

    def withdraw(self, rollout_ids: Sequence[str], epoch: int) -> LocalCall:
        return self._control("withdraw", rollout_ids, epoch)

    def advance(self, budget_s: float, epoch: int) -> LocalCall:
        return self._control("advance", budget_s, epoch)

    def submit_and_advance(self, work: Sequence[GroupWork], budget_s: float, epoch: int) -> LocalCall:
        return self._control("submit_and_advance", work, budget_s, epoch)

    def load_policy(self, version: int, blob: Blob, epoch: int) -> LocalCall:
        return self._service.run("load_policy", lambda s: s.load_policy(version, _value(blob), epoch))

    def load_drafter(self, version: int, blob: Blob, epoch: int) -> LocalCall:
        return self._service.run("load_drafter", lambda s: s.load_drafter(version, _value(blob), epoch))

    def set_strategy(self, name: str | None, epoch: int) -> LocalCall:
        return self._control("set_strategy", name, epoch)

    def take_states(self, step: int, epoch: int) -> tuple[Pending[HiddenStateChunk], Blob]:
        call = self._service.call("take_states", step, epoch)
        return Part(call, 0), Blob(Part(call, 1))

    def switch_memory(self, release: bool, epoch: int) -> LocalCall:
        return self._control("switch_memory", release, epoch)

    def predict_gain(self, work: Workload) -> LocalCall:
        return self._control("predict_gain", work)

    def selector_state(self) -> LocalCall:
        return self._control("selector_state")

    def restore_selector(self, state: SelectorState, epoch: int) -> LocalCall:
        return self._control("restore_selector", state, epoch)


class LocalDrafterClient(_Client):
    def initial_state(self) -> tuple[Pending[int], Blob]:
        call = self._service.run("initial_state", lambda s: s.initial_state())
        return Part(call, 0), Blob(Part(call, 1))

    def prepare(self, state: Blob) -> LocalCall:
        return self._service.run("prepare", lambda s: s.prepare(_value(state)))

    def begin(self, state: Blob, epoch: int, lane: int) -> LocalCall:
        return self._service.run("begin", lambda s: s.begin(_value(state), epoch, lane))

    def load_target_head(self, policy_version: int, blob: Blob) -> LocalCall:
        return self._service.run("load_target_head", lambda s: s.load_target_head(policy_version, _value(blob)))

    def add_chunk(self, chunk: HiddenStateChunk, blob: Blob) -> LocalCall:
        return self._service.run("add_chunk", lambda s: s.add_chunk(chunk, _value(blob)))

    def train(self, budget_s: float, epoch: int) -> LocalCall:
        return self._control("train", budget_s, epoch)

    def interrupt(self, epoch: int) -> LocalCall:
        """Behind the calls that were queued before it: only one call runs at a time here."""
        return self._control("interrupt", epoch)

    def snapshot(self, epoch: int) -> tuple[Pending[int], Blob]:
        call = self._service.run("snapshot", lambda s: s.snapshot(epoch))
        return Part(call, 0), Blob(Part(call, 1))

    def held(self) -> tuple[Pending[int], Blob]:
        call = self._service.run("held", lambda s: s.held())
        return Part(call, 0), Blob(Part(call, 1))

    def merge(self, states: Sequence[Blob], micro_steps: Sequence[int]) -> tuple[Pending[int], Blob]:
        call = self._service.run("merge", lambda s: s.merge([_value(b) for b in states], micro_steps))
        return Part(call, 0), Blob(Part(call, 1))

    def checkpoint(self, state: Blob) -> LocalCall:
        return self._service.run("checkpoint", lambda s: s.checkpoint(_value(state)))

    def export(self, state: Blob) -> tuple[Pending[int], Blob]:
        call = self._service.run("export", lambda s: s.export(_value(state)))
        return Part(call, 0), Blob(Part(call, 1))

    def estimate(self, drafters: dict[str, Blob], blob: Blob) -> LocalCall:
        return self._service.run(
            "estimate", lambda s: s.estimate({name: _value(b) for name, b in drafters.items()}, _value(blob))
        )


class LocalPolicyClient(_Client):
    def train_step(self, batch: TrainBatch) -> tuple[Pending[Any], Pending[Any], Blob]:
        refuse_tensors(batch, f"{self.name}.train_step")
        call = self._service.call("train_step", batch)
        return Part(call, 0), Part(call, 1), Blob(Part(call, 2))

    def steps_done(self) -> LocalCall:
        return self._service.run("steps_done", lambda s: s.steps_done)

    def publish(self) -> tuple[Pending[int], Blob, Blob]:
        call = self._service.call("publish")
        weights = Blob(Part(call, 1))
        return Part(call, 0), weights, weights

    def switch_memory(self, release: bool) -> LocalCall:
        return self._control("switch_memory", release)

    def copy_of(self, version: int) -> tuple[Pending[int], Blob]:
        """Of an offer; nothing is offered in one process."""
        call = self._service.call("copy_of", version)
        return Part(call, 0), Blob(Part(call, 1))

    def restored(self) -> tuple[Pending[CheckpointNote | None], Blob, Blob]:
        call = self._service.call("restored")
        return Part(call, 0), Blob(Part(call, 1)), Blob(Part(call, 2))

    def checkpoint(self, note: CheckpointNote, live: Blob | None, served: Blob | None) -> LocalCall:
        refuse_tensors(note, f"{self.name}.checkpoint")

        def value(blob: Blob | None) -> Any:
            return None if blob is None else _value(blob)

        return self._service.run("checkpoint", lambda s: s.checkpoint(note, value(live), value(served)))

    def flush(self, timeout_s: float) -> LocalCall:
        return self._control("flush", timeout_s)


class LocalEnergyClient(_Client):
    def read(self, since_s: float | None) -> LocalCall:
        return self._control("read", since_s)


class LocalRewardClient(_Client):
    def score(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> LocalCall:
        return self._control("score", prompts, rollouts)


def _value(blob: Blob) -> Any:
    """What a transport does with a reference at the receiver: a result that is at hand, or a plain value."""
    return blob.result(0.0) if isinstance(blob, Part) else blob
