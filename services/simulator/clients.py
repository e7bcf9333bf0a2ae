"""The core protocols over an agenda: a service does one thing at a time, in the order in which it was asked; a message
takes its time each way; what has died does not answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

from services.core.checkpoints import CheckpointNote
from services.core.errors import BlobLostError, ConfigError, ServiceLostError, StaleEpochError
from services.core.gain import Workload
from services.core.part import Part
from services.core.protocols import Blob, Pending
from services.core.selector import SelectorState
from services.core.types import GroupWork, HiddenStateChunk, Prompt, Rollout, TrainBatch
from services.simulator.agenda import Call, VirtualWaiter
from services.simulator.learning import Skill
from services.simulator.server import ServerModel
from services.simulator.trainers import PolicyModel, TrainerModel, score

Timed = tuple[Any, float]  # an answer, and the seconds that the service needs for it


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call that arrives at `arrival_s`. `needs`: what it was given, some of which may still be under way."""

    call: Call
    arrival_s: float
    work: Callable[[float], Timed]
    needs: tuple[Call, ...]

    @property
    def missing(self) -> Call | None:
        return next((need for need in self.needs if not need.done), None)


class _Process:
    """What calls go to. An answer is computed ahead, for the moment at which the service will come to it: nothing but
    its own calls changes a service. Only a call that was given what is still under way at its maker waits for that, and
    those behind it with it, as tasks of a Ray actor do."""

    def __init__(self, name: str, waiter: VirtualWaiter, message_s: float) -> None:
        self.name, self._waiter, self._message_s = name, waiter, message_s
        self._agenda = waiter.agenda
        self._free_s = 0.0
        self._open: set[Call] = set()
        self._queue: deque[_Asked] = deque()
        self._starts, self._up, self._epoch = 1, True, -1

    def ask(self, what: str, work: Callable[[float], Timed], needs: Iterable[Blob] = ()) -> Call:
        began, call = self._waiter.stopwatch(), self._waiter.call(f"{self.name}.{what}")
        arrival = self._agenda.now + self._message_s
        if self._up:
            self._queue.append(_Asked(call, arrival, work, tuple(_makers(needs))))
            if len(self._queue) == 1:  # else those before it wait for something
                self._serve()
        else:
            down = ServiceLostError(self.name, "it is down")
            self._agenda.at(arrival + self._message_s, partial(call.fail, down))
        self._waiter.model_s += self._waiter.stopwatch() - began
        return call

    def _serve(self) -> None:
        while self._queue:
            missing = self._queue[0].missing
            if missing is not None:
                missing.then(self._serve)
                return
            self._do(self._queue.popleft())

    def _do(self, asked: _Asked) -> None:
        call, start = asked.call, max(asked.arrival_s, self._agenda.now, self._free_s)
        try:
            answer, seconds = asked.work(start)
        except (StaleEpochError, BlobLostError) as error:
            self._agenda.at(start + self._message_s, partial(call.fail, error))
        else:
            self._free_s = start + seconds
            self._open.add(call)
            self._agenda.at(self._free_s + self._message_s, lambda: self._answered(call, answer))

    def _answered(self, call: Call, answer: Any) -> None:
        self._open.discard(call)
        call.settle(answer)

    def check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpochError(f"message of epoch {epoch} at {self.name} in epoch {self._epoch}: renew the lease")

    def kill(self) -> None:
        self._up = False
        waiting = [asked.call for asked in self._queue]
        self._queue.clear()
        for call in (*self._open, *waiting):
            call.fail(ServiceLostError(self.name, "killed"))
        self._open.clear()

    def restart(self) -> None:
        self._up, self._free_s, self._epoch = True, self._agenda.now, -1
        self._starts += 1

    def process_id(self) -> Call:
        return self.ask("process_id", lambda _: (self._starts, 0.0))

    def _leased(self, what: str, epoch: int, work: Callable[[float], Timed], needs: Iterable[Blob] = ()) -> Call:
        def checked(now: float) -> Timed:
            self.check(epoch)
            return work(now)

        return self.ask(what, checked, needs)


class SimulatedRollout(_Process):
    """`build` makes the model of a server that has just started."""

    def __init__(self, name: str, waiter: VirtualWaiter, message_s: float, build: Callable[[], ServerModel]) -> None:
        super().__init__(name, waiter, message_s)
        self._build, self._model = build, build()

    def restart(self) -> None:
        super().restart()
        self._model = self._build()

    def open_epoch(self, epoch: int) -> Call:
        def adopt(now: float) -> Timed:
            if epoch < self._epoch:
                raise StaleEpochError(f"epoch {epoch} is older than {self.name}'s {self._epoch}: renew the lease")
            self._epoch = epoch
            return self._model.open_epoch(epoch, now)

        return self.ask("open_epoch", adopt)

    def submit(self, work: Sequence[GroupWork], epoch: int) -> Call:
        return self._leased("submit", epoch, lambda now: self._model.submit(work, now))

    def withdraw(self, rollout_ids: Sequence[str], epoch: int) -> Call:
        return self._leased("withdraw", epoch, lambda now: self._model.withdraw(rollout_ids, now))

    def advance(self, budget_s: float, epoch: int) -> Call:
        return self._leased("advance", epoch, lambda now: self._model.advance(budget_s, now))

    def submit_and_advance(self, work: Sequence[GroupWork], budget_s: float, epoch: int) -> Call:
        return self._leased(
            "submit_and_advance", epoch, lambda now: self._model.submit_and_advance(work, budget_s, now)
        )

    def load_policy(self, version: int, blob: Blob, epoch: int) -> Call:
        return self._leased("load_policy", epoch, lambda now: self._model.load_policy(version, now))

    def load_drafter(self, version: int, blob: Blob, epoch: int) -> Call:
        def load(now: float) -> Timed:
            return self._model.load_drafter(version, _skill(blob), now)

        return self._leased("load_drafter", epoch, load, [blob])

    def set_strategy(self, name: str | None, epoch: int) -> Call:
        return self._leased("set_strategy", epoch, lambda now: self._model.set_strategy(name, now))

    def take_states(self, step: int, epoch: int) -> tuple[Pending[HiddenStateChunk], Blob]:
        raise ConfigError("a simulation takes hidden states from the policy trainer: set drafter.states: policy")

    def switch_memory(self, release: bool, epoch: int) -> Call:
        """Memory is no part of the model."""
        return self.ask("switch_memory", lambda _: (None, 0.0))

    def selector_state(self) -> Call:
        return self.ask("selector_state", self._model.selector_state)

    def restore_selector(self, state: SelectorState, epoch: int) -> Call:
        return self._leased("restore_selector", epoch, lambda now: self._model.restore_selector(state, now))

    def predict_gain(self, work: Workload) -> Call:
        """Nobody predicts here: nothing that the coordinator decides depends on it."""
        return self.ask("predict_gain", lambda _: (None, 0.0))


class SimulatedDrafter(_Process):
    def __init__(
        self,
        name: str,
        waiter: VirtualWaiter,
        message_s: float,
        micro_step_s: float,
        first: Skill,
        build: Callable[[], TrainerModel],
    ) -> None:
        super().__init__(name, waiter, message_s)
        self._micro_step_s, self._first, self._build, self._model = micro_step_s, first, build, build()
        self._training: tuple[Call, int, float] | None = None  # its call, epoch and beginning

    def restart(self) -> None:
        super().restart()
        self._model = self._build()

    def initial_state(self) -> tuple[Part, Blob]:
        return _parts(self.ask("initial_state", lambda _: ((0, self._first), 0.0)))

    def prepare(self, state: Blob) -> Call:
        return self.ask("prepare", lambda _: self._model.prepare(_skill(state)), [state])

    def begin(self, state: Blob, epoch: int, lane: int) -> Call:
        def adopt(_: float) -> Timed:
            self._epoch = epoch
            return self._model.begin(_skill(state), epoch, lane)

        return self.ask("begin", adopt, [state])

    def load_target_head(self, policy_version: int, blob: Blob) -> Call:
        return self.ask("load_target_head", lambda _: (None, 0.0))

    def add_chunk(self, chunk: HiddenStateChunk, blob: Blob) -> Call:
        return self.ask("add_chunk", lambda _: self._model.add_chunk(chunk.policy_version))

    def train(self, budget_s: float, epoch: int) -> Call:
        """Learns when it ends, because an `interrupt` may end it before."""
        call = self._waiter.call(f"{self.name}.train")
        start = max(self._agenda.now + self._message_s, self._free_s)
        if not self._up or epoch != self._epoch:
            reason = ServiceLostError(self.name, "it is down or was restarted")
            self._agenda.at(start + self._message_s, partial(call.fail, reason))
            return call
        steps = self._model.micro_steps(budget_s, epoch)
        self._open.add(call)
        self._training = call, epoch, start
        self._end(call, start, steps)
        return call

    def _end(self, call: Call, start: float, steps: int) -> None:
        self._free_s = start + steps * self._micro_step_s

        def told() -> None:
            if call in self._open:
                self._answered(call, self._model.train(steps))

        self._agenda.at(self._free_s + self._message_s, told)

    def interrupt(self, epoch: int) -> Call:
        call = self._waiter.call(f"{self.name}.interrupt")
        now = self._agenda.now + self._message_s
        self._agenda.at(now + self._message_s, partial(call.settle, None))
        self._model.interrupt(epoch)
        if self._training is not None and self._training[1] == epoch and self._training[0] in self._open:
            under_way, _, start = self._training
            steps = max(1, ceil((now - start) / self._micro_step_s)) if now > start else 0
            if start + steps * self._micro_step_s < self._free_s:
                self._end(under_way, start, steps)
        return call

    def snapshot(self, epoch: int) -> tuple[Part, Blob]:
        return _parts(self._leased("snapshot", epoch, lambda _: self._model.snapshot()))

    def held(self) -> tuple[Part, Blob]:
        return _parts(self.ask("held", lambda _: self._model.held()))

    def merge(self, states: Sequence[Blob], micro_steps: Sequence[int]) -> tuple[Part, Blob]:
        def combine(_: float) -> Timed:
            return self._model.merge([_skill(s) for s in states], micro_steps)

        return _parts(self.ask("merge", combine, states))

    def checkpoint(self, state: Blob) -> Call:
        return self.ask("checkpoint", lambda _: (None, 0.0))

    def export(self, state: Blob) -> tuple[Part, Blob]:
        return _parts(self.ask("export", lambda _: ((1, _skill(state)), 0.0), [state]))

    def estimate(self, drafters: dict[str, Blob], blob: Blob) -> Call:
        def fit(_: float) -> Timed:
            return self._model.estimate({name: _skill(b) for name, b in drafters.items()}, _value(blob))

        return self.ask("estimate", fit, [*drafters.values(), blob])


class SimulatedPolicy(_Process):
    def __init__(self, waiter: VirtualWaiter, message_s: float, model: PolicyModel) -> None:
        super().__init__("policy", waiter, message_s)
        self._model = model

    def train_step(self, batch: TrainBatch) -> tuple[Part, Part, Blob]:
        call = self.ask("train_step", lambda _: self._model.train_step(batch))
        return Part(call, 0), Part(call, 1), Blob(Part(call, 2))

    def steps_done(self) -> Call:
        return self.ask("steps_done", lambda _: (self._model.steps_done, 0.0))

    def publish(self) -> tuple[Part, Blob, Blob]:
        call = self.ask("publish", lambda _: self._model.publish())
        return Part(call, 0), Blob(Part(call, 1)), Blob(Part(call, 1))

    def switch_memory(self, release: bool) -> Call:
        return self.ask("switch_memory", lambda _: (None, 0.0))

    def copy_of(self, version: int) -> tuple[Part, Blob]:
        return _parts(self.ask("copy_of", lambda _: ((version, version), 0.0)))

    def restored(self) -> tuple[Part, Blob, Blob]:
        call = self.ask("restored", lambda _: ((None, None, None), 0.0))
        return Part(call, 0), Blob(Part(call, 1)), Blob(Part(call, 2))

    def checkpoint(self, note: CheckpointNote, live: Blob | None, served: Blob | None) -> Call:
        return self.ask("checkpoint", lambda _: (None, 0.0))

    def flush(self, timeout_s: float) -> Call:
        return self.ask("flush", lambda _: (None, 0.0))


class SimulatedReward(_Process):
    """Any number of verifications side by side."""

    def __init__(self, waiter: VirtualWaiter, message_s: float, reward_s: float) -> None:
        super().__init__("reward", waiter, message_s)
        self._reward_s = reward_s

    def score(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> Call:
        call = self._waiter.call("reward.score")
        ready = self._agenda.now + 2 * self._message_s + self._reward_s
        self._agenda.at(ready, lambda: call.settle(score(prompts, rollouts)))
        return call


def _parts(call: Call) -> tuple[Part, Blob]:
    return Part(call, 0), Blob(Part(call, 1))


def _makers(blobs: Iterable[Blob]) -> Iterator[Call]:
    """The calls that these are answers of."""
    for blob in blobs:
        if isinstance(blob, Part):
            assert isinstance(blob.call, Call)
            yield blob.call


def _value(blob: Blob) -> Any:
    """A reference is resolved where it arrives. Raises BlobLostError when its maker is lost."""
    if not isinstance(blob, Part):
        return blob
    try:
        return blob.result(0.0)
    except ServiceLostError as error:
        raise BlobLostError(f"the answer to {blob.what} is gone: {error}") from error


def _skill(blob: Blob) -> Skill:
    value = _value(blob)
    assert isinstance(value, Skill), f"a training state, not {value!r}"
    return value
