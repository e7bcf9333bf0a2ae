"""An actor that stands for hundreds of slots: simulated servers and trainers in real time, each in its own order.

The coordinator talks to them as to one actor each: `SlotHandle` is what its clients take for an actor's handle, and
every call goes over Ray with the arguments that an actor of its own would get: which service is meant is in the name of
the task, which every task has. What a service would compute it waits for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from services.config.schema import ClusterConfig
from services.core.errors import StaleEpochError
from services.core.packed import packed_ids, packed_logprobs
from services.core.types import DrafterProgress, Prompt, Reward, Rollout, ServerReport
from services.simulator.learning import Skill
from services.simulator.scenario import Scenario
from services.simulator.server import Prices, ServerModel
from services.simulator.trainers import PolicyModel, TrainerModel, score

ADVANCES = frozenset({"advance", "submit_and_advance"})  # what a server answers with a report

TOKEN_CHARS = 3  # of text, about


class _Server:
    """A rollout server: its model behind epochs. `gaps`: seconds from a report until it was asked to go on, in one
    phase."""

    def __init__(self, model: ServerModel) -> None:
        self._model, self._epoch = model, -1
        self._told_s: float | None = None
        self.gaps: list[float] = []

    def plan(self, method: str, args: Sequence[Any]) -> tuple[Any, float]:
        now, told_s, self._told_s = time.monotonic(), self._told_s, None
        if method == "process_id":
            return os.getpid(), 0.0
        if method == "predict_gain":
            return None, 0.0
        if method == "selector_state":
            return self._model.selector_state(now)
        if method == "open_epoch":
            self._epoch = args[0]
            return self._model.open_epoch(self._epoch, now)
        if args[-1] != self._epoch:
            raise StaleEpochError(f"epoch {args[-1]} where {self._epoch} is: renew the lease")
        if method in ADVANCES and told_s is not None:
            self.gaps.append(now - told_s)
        given = (args[0],) if method == "load_policy" else tuple(args[:-1])
        return getattr(self._model, method)(*given, now)  # type: ignore[no-any-return]

    def told(self, method: str, answer: Any) -> Any:
        if method not in ADVANCES:
            return answer
        report: ServerReport = replace(answer, finished=tuple(_whole(r) for r in answer.finished))
        if report.running or report.waiting:
            self._told_s = time.monotonic()
        return report


def _whole(rollout: Rollout) -> Rollout:
    """With token ids, log probabilities and text, so that its message has its size."""
    count = len(rollout.response_ids)
    ids, logprobs = packed_ids(range(count)), packed_logprobs((-0.5,) * count)
    return replace(rollout, response_ids=ids, rollout_logprobs=logprobs, text="x" * (TOKEN_CHARS * count))


def whole_prompt(prompt: Prompt) -> Prompt:
    """As `_whole`: a simulation's has no token ids, only their number."""
    return replace(prompt, token_ids=tuple(prompt.token_ids), text="x" * (TOKEN_CHARS * len(prompt.token_ids)))


class _Trainer:
    """A drafter trainer: its model, and training that an `interrupt` ends."""

    def __init__(self, scenario: Scenario) -> None:
        self._model, self._micro_step_s = TrainerModel(scenario), scenario.seconds.micro_step
        self._first, self._stop = scenario.learning.first(), asyncio.Event()

    def plan(self, method: str, args: Sequence[Any]) -> tuple[Any, float]:
        match method:
            case "process_id":
                return os.getpid(), 0.0
            case "initial_state":
                return (0, self._first), 0.0
            case "load_target_head" | "checkpoint":
                return None, 0.0
            case "add_chunk":
                return self._model.add_chunk(args[0].policy_version)
            case "snapshot":
                return self._model.snapshot()
            case "export":
                return (1, args[0]), 0.0
            case "merge":  # a client sends the micro-steps first, so that Ray resolves the states
                return self._model.merge(list(args[1:]), args[0])
            case "estimate":
                return self._model.estimate(dict(zip(args[0], args[2:], strict=True)), args[1])
        return getattr(self._model, method)(*args)  # type: ignore[no-any-return]

    def begin(self, state: Skill, epoch: int, lane: int) -> tuple[int, float]:
        self._stop = asyncio.Event()
        return self._model.begin(state, epoch, lane)

    async def train(self, budget_s: float, epoch: int) -> DrafterProgress:
        planned, done = self._model.micro_steps(budget_s, epoch), 0
        while done < planned and not self._stop.is_set():
            await asyncio.sleep(self._micro_step_s)
            done += 1
        return self._model.train(done)

    def interrupt(self, epoch: int) -> None:
        self._model.interrupt(epoch)
        self._stop.set()


class _Line:
    """Calls of one service, one at a time in the order in which they were made: Ray starts a call of an actor like this
    as soon as its arguments are there."""

    def __init__(self) -> None:
        self._turn, self._waiting = 0, dict[int, asyncio.Future[None]]()

    async def enter(self, number: int) -> None:
        if number != self._turn:
            self._waiting[number] = asyncio.get_running_loop().create_future()
            await self._waiting[number]

    def leave(self) -> None:
        self._turn += 1
        following = self._waiting.pop(self._turn, None)
        if following is not None:
            following.set_result(None)


class SlotHost:
    """Services of `slots`; of the host with `everything` the policy trainer and the reward workers as well."""

    def __init__(self, config: ClusterConfig, scenario: Scenario, slots: Sequence[int], everything: bool) -> None:
        prices = Prices(scenario.costs)
        self._servers = {slot: _Server(ServerModel(config, scenario, prices, slot)) for slot in slots}
        self._trainers = {slot: _Trainer(scenario) for slot in slots}
        self._policy = PolicyModel(scenario) if everything else None
        self._lines: defaultdict[tuple[str, int], _Line] = defaultdict(_Line)
        self.calls = 0

    async def process_id(self) -> int:
        return os.getpid()

    async def measured(self) -> tuple[int, list[float]]:
        """(calls so far, seconds from answers to the next orders)."""
        return self.calls, [gap for server in self._servers.values() for gap in server.gaps]

    async def call(self, *args: Any) -> Any:
        """What the task is named: see `_address`."""
        kind, slot, number, method = _addressed(ray.get_runtime_context().get_task_name())
        self.calls += 1
        if number < 0:
            return self._trainers[slot].interrupt(*args)
        line = self._lines[kind, slot]
        await line.enter(number)
        try:
            return await self._answer(kind, slot, method, args)
        finally:
            line.leave()

    async def _answer(self, kind: str, slot: int, method: str, args: tuple[Any, ...]) -> Any:
        if kind == "rollout":
            server = self._servers[slot]
            answer, seconds = server.plan(method, args)
            await asyncio.sleep(seconds)
            return server.told(method, answer)
        if kind == "drafter":
            trainer = self._trainers[slot]
            if method == "train":
                return await trainer.train(*args)
            answer, seconds = trainer.begin(*args) if method == "begin" else trainer.plan(method, args)
            await asyncio.sleep(seconds)
            return answer
        return await self._central(method, args)

    async def _central(self, method: str, args: tuple[Any, ...]) -> Any:
        assert self._policy is not None
        if method == "score":
            rewards: list[Reward] = score(*args)
            return rewards
        if method == "steps_done":
            return self._policy.steps_done
        answer, seconds = self._policy.train_step(*args) if method == "train_step" else self._policy.publish()
        await asyncio.sleep(seconds)
        return answer


def _address(kind: str, slot: int, number: int, method: str) -> str:
    """`number`: of the service's calls, from 0; -1: it overtakes."""
    return f"{kind} {slot} {number} {method}"


def _addressed(name: str) -> tuple[str, int, int, str]:
    kind, slot, number, method = name.split()
    return kind, int(slot), int(number), method


class SlotHandle:
    """One service in a host, with the surface of an actor's handle. Its calls are numbered: one process makes them."""

    def __init__(self, host: Any, kind: str, slot: int) -> None:
        self._host, self._kind, self._slot, self._calls = host, kind, slot, 0

    def __getattr__(self, method: str) -> _Method:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self, method)

    def _send(self, method: str, num_returns: int, args: tuple[Any, ...]) -> Any:
        number = -1
        if method != "interrupt":
            number, self._calls = self._calls, self._calls + 1
        name = _address(self._kind, self._slot, number, method)
        return self._host.call.options(name=name, num_returns=num_returns).remote(*args)


class _Method:
    def __init__(self, handle: SlotHandle, method: str, num_returns: int = 1) -> None:
        self._handle, self._method, self._num_returns = handle, method, num_returns

    def options(self, num_returns: int = 1, concurrency_group: str = "") -> _Method:
        """A host runs its calls side by side: what overtakes needs no group."""
        return _Method(self._handle, self._method, num_returns)

    def remote(self, *args: Any) -> Any:
        return self._handle._send(self._method, self._num_returns, args)
