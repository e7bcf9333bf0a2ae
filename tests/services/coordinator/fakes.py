"""Services on simulated time: engines that take ticks, a policy and a drafter that count. They keep the contracts
(epochs, versions, loads before work) and complain when the coordinator breaks one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.core.errors import BatchError, BlobLostError, StaleEpochError, TransferError
from services.core.gain import ExpectedGain, Workload
from services.core.selector import SelectorState
from services.core.types import (
    AcceptanceEstimate,
    AcceptanceStats,
    DrafterProgress,
    FinishReason,
    HiddenStateChunk,
    MemorySwitch,
    PartialRollout,
    PolicyStepReport,
    Prompt,
    Reward,
    Rollout,
    RunningRequest,
    SamplingParams,
    ServedVersions,
    ServerReport,
    StrategySpan,
)

SAMPLING = SamplingParams(max_tokens=400, stop_token_ids=(0,))


def make_prompts(count: int, start: int = 0) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"p{i}", f"text {i}", (1, 2, i), "7", "fake") for i in range(start, start + count))


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)


@dataclass
class FakeRollout:
    """Response length comes from the seed; one token takes `token_s` for all running requests, a prefill next to
    nothing."""

    slot: int
    clock: FakeClock
    capacity: int
    needs_drafter: bool = True
    token_s: float = 0.01
    epoch: int = -1
    policy: int | None = None
    drafter: int | None = None
    strategy: str | None = None
    requests: list[list[Any]] = field(default_factory=list)
    served: int = 0
    kept: int = 0  # finished rollouts whose work asked for their states
    asked: list[tuple[str, bool]] = field(default_factory=list)  # group id and whether its states are asked for
    withdrawn: list[tuple[str, int]] = field(default_factory=list)  # rollout id and tokens it had
    continued: list[tuple[str, int]] = field(default_factory=list)
    prefill: int = 0
    predicts: bool = True
    predicted: list[Workload] = field(default_factory=list)
    rounds: int = 0  # what its selector has learned
    restored: list[Any] = field(default_factory=list)
    released: bool = False
    switches: list[MemorySwitch] = field(default_factory=list)

    def open_epoch(self, epoch: int) -> ServedVersions:
        if epoch < self.epoch:
            raise StaleEpochError("old")
        if epoch > self.epoch:
            self.requests.clear()
        self.epoch = epoch
        return self._versions()

    def submit(self, work: Any, epoch: int) -> None:
        self._check(epoch)
        assert self.policy is not None, "work before weights"
        assert not self.released, "work for a server without memory"
        for w in work:
            self.asked.append((w.group_id, w.keep_states))
            for index, seed in zip(w.indices, w.seeds, strict=True):
                # One response in twelve is the long tail, of very different lengths.
                if any((w.group_id, index) == (r[0].group_id, r[1]) for r in self.requests):
                    continue  # the message came twice
                length = 5 + seed % 20 if seed % 12 else 100 + random.Random(seed).randrange(300)
                known = w.partial(index)
                self.prefill += len(w.prompt.token_ids) + (len(known.response_ids) if known else 0)
                self.continued += [(known.rollout_id, len(known.response_ids))] if known else []
                self.requests.append([w, index, seed, length, len(known.response_ids) if known else 0])
        assert len(self.requests) <= self.capacity, "more work than the server can run"

    def switch_memory(self, release: bool, epoch: int) -> MemorySwitch | None:
        self._check(epoch)
        assert not self.requests, "memory is switched under running requests"
        if release == self.released:
            return None
        self.released = release
        self.switches.append(MemorySwitch(release, 0.1, 1000))
        self.clock.now += 0.1
        return self.switches[-1]

    def withdraw(self, rollout_ids: Any, epoch: int) -> tuple[PartialRollout, ...]:
        self._check(epoch)
        out = [r for r in self.requests if f"{r[0].group_id}#{r[1]}" in rollout_ids]
        self.requests = [r for r in self.requests if r not in out]
        self.withdrawn += [(f"{w.group_id}#{i}", known) for w, i, _, _, known in out]
        stats = AcceptanceStats()
        return tuple(
            PartialRollout(
                w.group_id, i, tuple(seed % 97 + n for n in range(known)), (0.0,) * known, (self.policy or 0,),
                (self.drafter or 0,), stats, 0.0,
            )
            for w, i, seed, _, known in out
        )  # fmt: skip

    def submit_and_advance(self, work: Any, budget_s: float, epoch: int) -> ServerReport:
        self.submit(work, epoch)
        return self.advance(budget_s, epoch)

    def advance(self, budget_s: float, epoch: int) -> ServerReport:
        self._check(epoch)
        start, done, tokens, rounds, steps, first = self.clock(), [], 0, 0, 0, len(self.requests)
        prefill, self.prefill = self.prefill, 0
        self.rounds += 1
        self.clock.now += 1e-5 * prefill
        while self.requests and self.clock() - start < budget_s:
            self.clock.now += self.token_s
            rounds, steps, last = rounds + 1, steps + len(self.requests), len(self.requests)
            for request in list(self.requests):
                request[4] += 1
                tokens += 1
                if request[4] >= request[3]:
                    self.requests.remove(request)
                    done.append(self._rollout(*request))
                    self.kept += request[0].keep_states
        running = tuple(RunningRequest(f"{r[0].group_id}#{r[1]}", r[4], AcceptanceStats()) for r in self.requests)
        self.served += len(done)
        return ServerReport(
            tuple(done), running, 0, tokens, self.clock() - start, self.strategy or "off", self._versions(), prefill,
            1e-5 * prefill, spans=(self._span(rounds, steps, first, last),) if rounds else (),
        )  # fmt: skip

    def _span(self, rounds: int, steps: int, first: int, last: int) -> StrategySpan:
        """Left alone it claims to be twice as fast as OFF; of a forced strategy it predicts nothing."""
        seconds, claimed = rounds * self.token_s, None if self.strategy else rounds * self.token_s
        off_s = None if claimed is None else 2 * claimed
        return StrategySpan(
            -seconds, 0.0, self.strategy or "eagle_3_1_4", "forced" if self.strategy else "fastest", rounds, seconds,
            steps, steps, first, last, claimed, off_s,
        )  # fmt: skip

    def load_policy(self, version: int, tensors: Any, epoch: int) -> ServedVersions:
        self._check(epoch)
        assert tensors == f"policy {version}" and not self.released
        self.policy = version
        return self._versions()

    def load_drafter(self, version: int, tensors: Any, epoch: int) -> ServedVersions:
        self._check(epoch)
        assert isinstance(tensors, dict) and "trained" in tensors
        fetch(tensors)
        self.drafter = version
        return self._versions()

    def set_strategy(self, name: str | None, epoch: int) -> None:
        self._check(epoch)
        self.strategy = name

    def take_states(self, step: int, epoch: int) -> tuple[HiddenStateChunk, str]:
        self._check(epoch)
        assert (not self.requests and self.policy is not None) or not self.kept
        kept, self.kept = self.kept, 0
        return HiddenStateChunk(self.policy or 0, step, kept, 10 * kept, 1000 * kept), f"hidden {step}"

    def predict_gain(self, work: Workload) -> ExpectedGain | None:
        """Three quarters of the time for each token, so 4/3 whatever the lengths."""
        self.predicted.append(work)
        return ExpectedGain(0.75 * sum(work.lengths), float(sum(work.lengths))) if self.predicts else None

    def selector_state(self) -> SelectorState | None:
        return (
            None if self.policy is None else SelectorState(f"slot {self.slot}", {"kind": "fake", "rounds": self.rounds})
        )

    def restore_selector(self, state: SelectorState, epoch: int) -> bool:
        self._check(epoch)
        assert self.policy is None and self.drafter is None, "it would have measured its costs with the first load"
        self.restored.append(state)
        if state.place != f"slot {self.slot}":
            return False
        self.rounds = state.learned["rounds"]
        return True

    def _rollout(self, w: Any, index: int, seed: int, length: int, _: int) -> Rollout:
        ids = tuple(seed % 97 + i for i in range(length))
        stats = AcceptanceStats((length // 2, length // 4), length, {"eagle": length // 2})
        if self.strategy == "off":
            stats = AcceptanceStats((), 0, {"off": length})
        return Rollout(
            w.group_id, w.prompt.id, index, seed, w.prompt.token_ids, ids, (0.0,) * length, "t", FinishReason.STOP,
            w.sampling, (self.policy or 0,), (self.drafter or 0,), stats, f"rollout-{self.slot}",
        )  # fmt: skip

    def _versions(self) -> ServedVersions:
        return ServedVersions(self.policy, self.drafter)

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpochError(f"{epoch} is not {self.epoch}")


def fetch(*states: Any) -> None:
    """What a receiver does first with tensors by reference."""
    if any(state.get("lost") for state in states):
        raise BlobLostError("tensors are lost with the machine that held them")


@dataclass
class FakeDrafter:
    """Its state is {"trained": micro-steps}; it refuses to train without begin, head and data."""

    slot: int
    clock: FakeClock
    epoch: int = -1
    state: dict[str, int] | None = None
    head: int | None = None
    chunks: list[int] = field(default_factory=list)
    micro_steps_done: int = 0
    lane: int = -1
    interrupted: int = -1
    merges: int = 0
    checkpoints: list[int] = field(default_factory=list)
    made: list[dict[str, int]] = field(default_factory=list)  # what lies on this trainer's machine
    snapshot_s: float = 0.0
    prepared: list[int] = field(default_factory=list)  # micro-steps of the states
    begun: list[tuple[int, bool]] = field(default_factory=list)  # micro-steps of the state, and whether it was held
    before_train: Callable[[], None] = lambda: None

    def lose_made(self) -> None:
        """The machine is gone, and so is what lay there."""
        for state in self.made:
            state["lost"] = True

    def _make(self, state: dict[str, int]) -> dict[str, int]:
        self.made.append(state)
        return state

    def initial_state(self) -> tuple[int, Any]:
        return 0, self._make({"trained": 0})

    def prepare(self, state: Any) -> None:
        fetch(state)
        self.prepared.append(state["trained"])
        self.state = dict(state)

    def begin(self, state: Any, epoch: int, lane: int) -> int:
        assert epoch > self.epoch or lane == self.lane  # the next round of the same lease
        fetch(state)
        self.begun.append((state["trained"], self.state == state))
        self.state, self.epoch, self.lane = dict(state), epoch, lane
        return self.state["trained"]

    def load_target_head(self, policy_version: int, tensors: Any) -> None:
        assert tensors == f"policy {policy_version}"
        self.head = policy_version

    def add_chunk(self, chunk: HiddenStateChunk, tensors: Any) -> None:
        assert tensors == f"hidden {chunk.step}"
        self.chunks.append(chunk.step)

    def train(self, budget_s: float, epoch: int) -> DrafterProgress:
        if epoch != self.epoch:
            raise StaleEpochError("old")
        self.before_train()
        assert self.state is not None and self.head is not None
        steps = 2 if self.chunks and self.interrupted != epoch else 0
        self.clock.now += budget_s
        self.state["trained"] += steps
        self.micro_steps_done += steps
        return DrafterProgress(steps, self.state["trained"], 10, 1.0, (0.5,), budget_s)

    def interrupt(self, epoch: int) -> None:
        self.interrupted = epoch

    def held(self) -> tuple[int, Any]:
        return (-1, None) if self.state is None else (self.state["trained"], self._make(dict(self.state)))

    def merge(self, states: Any, micro_steps: Any) -> tuple[int, dict[str, int]]:
        fetch(*states)
        begun = {s["trained"] - n for s, n in zip(states, micro_steps, strict=True)}
        assert len(begun) == 1, "a round's states must begin from one"
        self.merges += 1
        total = begun.pop() + sum(micro_steps)
        return total, self._make({"trained": total})

    def checkpoint(self, state: Any) -> None:
        fetch(state)
        self.checkpoints.append(state["trained"])

    def snapshot(self, epoch: int) -> tuple[int, dict[str, int]]:
        if epoch != self.epoch:
            raise StaleEpochError("old")
        assert self.state is not None
        self.clock.now += self.snapshot_s
        return self.state["trained"], self._make(dict(self.state))

    def export(self, state: Any) -> tuple[int, dict[str, int]]:
        fetch(state)
        return 1, self._make(dict(state))

    def estimate(self, drafters: Any, tensors: Any) -> list[AcceptanceEstimate]:
        fetch(*drafters.values())
        return [AcceptanceEstimate(n, (0.5,), 1.0 + s["trained"] / 1000, 10) for n, s in drafters.items()]


@dataclass
class FakePolicy:
    clock: FakeClock
    version: int = 0
    no_signal_every: int = 10**9
    batches: list[Any] = field(default_factory=list)
    kept: tuple[Any, Any, Any] | None = None  # (note, live, served) of the checkpoint it went on from
    checkpoints: list[tuple[Any, Any, Any]] = field(default_factory=list)
    flushed: int = 0
    copies: list[int] = field(default_factory=list)
    released: bool = False
    servers: Callable[[], Sequence[FakeRollout | None]] = tuple  # on whose GPUs it works; None: dead
    before_step: Callable[[], None] = lambda: None
    step_s: float = 0.5

    def switch_memory(self, release: bool) -> MemorySwitch | None:
        if release == self.released:
            return None
        if not release:
            self._alone()
        self.released = release
        return MemorySwitch(release, 0.1, 500)

    def _alone(self) -> None:
        """A process that nobody has talked to yet holds what it began with."""
        held = [s.slot for s in self.servers() if s is not None and s.epoch != -1 and not s.released]
        assert not held, f"slots {held} have their memory while the policy has its own"

    def train_step(self, batch: Any) -> tuple[PolicyStepReport, HiddenStateChunk, str]:
        assert not self.released
        self.before_step()
        self._alone()
        if batch.step <= self.steps_done:
            raise BatchError("trained on already")
        self.clock.now += self.step_s
        old, self.version = self.version, self.version + (batch.step % self.no_signal_every != 0)
        assert all(r.policy_versions == (old,) for r in batch.rollouts), "off-policy rollouts"
        self.batches.append(batch)
        report = PolicyStepReport(self.version, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 10, 0.0, (), 0.5)
        kept = HiddenStateChunk(old, batch.step, 4, 40, 4000)
        none = HiddenStateChunk(0, batch.step, 0, 0, 0)
        return report, kept if batch.keep_states else none, f"hidden {batch.step}"

    @property
    def steps_done(self) -> int:
        if self.batches:
            return self.batches[-1].step
        return self.kept[0].step if self.kept else 0

    def publish(self) -> tuple[int, str]:
        return self.version, f"policy {self.version}"

    def restored(self) -> tuple[Any, Any, Any]:
        return self.kept or (None, None, None)

    def checkpoint(self, note: Any, live: Any, served: Any) -> None:
        assert note.step == self.steps_done and note.drafter_ahead is (served is not None)
        self.checkpoints.append((note, dict(live or {}), dict(served or live or {})))

    def flush(self, timeout_s: float) -> None:
        self.flushed = len(self.checkpoints)

    def copy_of(self, version: int) -> tuple[int, str]:
        self.copies.append(version)
        if version != self.version:
            raise TransferError(f"policy version {version} is superseded")
        return version, f"policy {version}"


class FakeReward:
    def score(self, prompts: Any, rollouts: Any) -> list[Reward]:
        return [Reward(float(r.seed % 2), bool(r.seed % 2)) for r in rollouts]
