"""The rollout server: an engine behind slot epochs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from services.config.schema import ClusterConfig
from services.config.schema import NativeEngine as NativeEngineConfig
from services.config.speculation import AdaptiveSelector
from services.core.errors import ConfigError, RequestError, StaleEpochError
from services.core.gain import ExpectedGain, Workload
from services.core.protocols import Clock
from services.core.selector import SelectorState
from services.core.types import (
    GroupWork,
    HiddenStateChunk,
    MemorySwitch,
    PartialRollout,
    Rollout,
    ServedVersions,
    ServerReport,
)
from services.models.device import device_name, pick_device, pick_dtype
from services.models.files import model_dir, read_config
from services.models.hidden import HiddenStates
from services.models.layers import model_spec
from services.models.target import TargetModel
from services.models.tokenizer import load_tokenizer
from services.rollout.calibrate import Calibration, Limits
from services.rollout.engine import RolloutEngine
from services.rollout.native import EngineOptions, NativeEngine
from services.rollout.sglang.build import build_sglang_engine
from services.speculation.adaptive import Adaptive
from services.speculation.cost_table import NETWORK
from services.speculation.gain import predict
from services.speculation.selector import make_selector
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy
from services.speculation.suffix_index import SuffixIndex
from services.weights.parts import Incoming


class RolloutService:
    """Every call carries the slot's epoch; an older one is refused, so a late message cannot disturb a new lease."""

    def __init__(
        self,
        engine: RolloutEngine,
        strategies: Mapping[str, DraftStrategy],
        clock: Clock,
        after_load: Callable[[], None] | None = None,
    ) -> None:
        self._engine, self._strategies, self._clock = engine, dict(strategies), clock
        self._after_load = after_load or (lambda: None)
        self._epoch: int | None = None  # none until the first open_epoch
        self._finished: list[Rollout] = []  # ended while others were withdrawn: the next report tells them
        self._untold_tokens = 0  # generated since the last report
        self._switches: list[MemorySwitch] = []  # of memory, since the last report
        self._open: set[tuple[str, int]] = set()  # accepted and neither told nor handed back

    def open_epoch(self, epoch: int) -> ServedVersions:
        """Adopt `epoch`, dropping whatever an older one left running."""
        if self._epoch is not None and epoch < self._epoch:
            raise StaleEpochError(f"epoch {epoch} is older than this server's {self._epoch}: renew the lease")
        if epoch != self._epoch:
            self._engine.abort()
            self._engine.take_spans()
            self._finished, self._untold_tokens = [], 0
            self._open.clear()
        self._epoch = epoch
        return self._engine.versions

    def submit(self, work: Sequence[GroupWork], epoch: int) -> None:
        """Queue all groups or, when one cannot be served, none: a sender may then send the good ones again. What is
        queued or runs already is passed over, so a message that comes twice changes nothing."""
        self._check(epoch)
        new = [n for item in work if (n := self._new_part(item)) is not None]
        self._engine.submit(new)
        self._open.update((item.group_id, i) for item in new for i in item.indices)

    def _new_part(self, item: GroupWork) -> GroupWork | None:
        new = [i for i in item.indices if (item.group_id, i) not in self._open]
        if len(new) == len(item.indices):
            return item
        return item.subset(new) if new else None

    def withdraw(self, rollout_ids: Sequence[str], epoch: int) -> tuple[PartialRollout, ...]:
        """Stop these rollouts and hand back what there is of them; what has finished meanwhile is told by the next
        report instead, and ids that this server does not run are passed over."""
        self._check(epoch)
        before = self._engine.num_tokens
        found = self._engine.withdraw(frozenset(rollout_ids))
        self._finished.extend(found.finished)
        self._open.difference_update((p.group_id, p.index) for p in found.partials)
        out = sum(len(r.response_ids) for r in (*found.partials, *found.finished))
        self._untold_tokens += self._engine.num_tokens + out - before
        return found.partials

    def advance(self, budget_s: float, epoch: int) -> ServerReport:
        """Run rounds for about `budget_s` seconds, or until nothing is left."""
        self._check(epoch)
        engine, started = self._engine, self._clock()
        finished, tokens, prefilled = list[Rollout](), engine.num_tokens, engine.prefilled
        while engine.num_running or engine.num_waiting:
            finished.extend(engine.step(budget_s - (self._clock() - started)))
            if self._clock() - started >= budget_s:
                break
        ended = self._clock()
        new_tokens = engine.num_tokens + sum(len(r.response_ids) for r in finished) - tokens
        report = ServerReport(
            finished=(*self._finished, *finished),
            running=engine.running(),
            waiting=engine.num_waiting,
            new_tokens=new_tokens + self._untold_tokens,
            busy_s=ended - started,
            strategy=engine.last_strategy.name,
            versions=engine.versions,
            prefill_tokens=engine.prefilled[0] - prefilled[0],
            prefill_s=engine.prefilled[1] - prefilled[1],
            memory_switches=tuple(self._switches),
            spans=tuple(span.moved(-ended) for span in engine.take_spans()),
        )
        self._finished, self._untold_tokens, self._switches = [], 0, []
        self._open.difference_update((r.group_id, r.index) for r in report.finished)
        return report

    def submit_and_advance(self, work: Sequence[GroupWork], budget_s: float, epoch: int) -> ServerReport:
        self.submit(work, epoch)
        return self.advance(budget_s, epoch)

    def load_policy(self, version: int, tensors: Mapping[str, Tensor], epoch: int) -> ServedVersions:
        self._check(epoch)
        self._engine.load_policy(version, tensors)
        self._after_load()
        return self._engine.versions

    def receive_policy(self, version: int, incoming: Incoming, epoch: int) -> ServedVersions:
        """`load_policy` of weights that are still on their way. Raises TransferError when they do not come."""
        self._check(epoch)
        try:
            self._engine.receive_policy(version, incoming)
        finally:
            incoming.close()
        self._after_load()
        return self._engine.versions

    def load_drafter(self, version: int, tensors: Mapping[str, Tensor], epoch: int) -> ServedVersions:
        self._check(epoch)
        self._engine.load_drafter(version, tensors)
        self._after_load()
        return self._engine.versions

    def set_strategy(self, name: str | None, epoch: int) -> None:
        self._check(epoch)
        if name is not None and name not in self._strategies:
            raise ConfigError(f"strategy {name!r} is not configured: one of {', '.join(self._strategies)}")
        self._engine.force_strategy(None if name is None else self._strategies[name])

    def switch_memory(self, release: bool, epoch: int) -> MemorySwitch | None:
        """Release or resume the GPU memory of an idle server, so that another holder of the slot can use it; None when
        that is done already, or by a process before this one."""
        self._check(epoch)
        engine, word = self._engine, "release" if release else "resume"
        count = engine.num_running + engine.num_waiting
        if count:
            raise RequestError(f"{count} requests run: {word} the memory when all have ended")
        if engine.released == release:
            return None
        started = self._clock()
        num_bytes = engine.switch_memory(release)
        switch = MemorySwitch(release, self._clock() - started, num_bytes)
        self._switches.append(switch)
        return switch

    def take_states(self, step: int, epoch: int) -> tuple[HiddenStateChunk, list[HiddenStates]]:
        """The hidden states kept since the last call, for the drafter; `step` is noted on the chunk."""
        self._check(epoch)
        return self._engine.take_states(step)

    def predict_gain(self, work: Workload) -> ExpectedGain | None:
        """What drafting is expected to gain on this work; None when the selector decides without models of costs and
        acceptance."""
        models = self._engine.models
        if models is None:
            return None
        ready = self._engine.versions.drafter is not None
        able = [s for s in self._strategies.values() if ready or s.drafter not in NETWORK]
        return predict(work, able, models.costs, models.acceptance).gain

    def selector_state(self) -> SelectorState | None:
        """What the selector has learned; None of one that learns nothing, or has not begun: a process that serves
        nothing yet is about to be told what it knew."""
        return None if self._engine.versions.policy is None else self._engine.selector_state()

    def restore_selector(self, state: SelectorState, epoch: int) -> bool:
        """Let it go on from there, before the first load; False when the state does not fit."""
        self._check(epoch)
        return self._engine.restore_selector(state)

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpochError(f"message of epoch {epoch} at a server in epoch {self._epoch}: renew the lease")


def build_rollout_service(config: ClusterConfig, slot: int, clock: Clock = time.monotonic) -> RolloutService:
    """The rollout server of one slot; weights arrive by load_policy / load_drafter."""
    engine, after_load = build_engine(config, slot, clock)
    return RolloutService(engine, {s.name: s for s in _strategies(config)}, clock, after_load)


def build_engine(
    config: ClusterConfig, slot: int, clock: Clock = time.monotonic
) -> tuple[RolloutEngine, Callable[[], None] | None]:
    """The engine of one slot without weights, and what it has to do behind a load of them."""
    engine = config.rollout.engine
    if not isinstance(engine, NativeEngineConfig):
        return build_sglang_engine(config, engine, slot), None
    return _native_engine(config, engine, _strategies(config), slot, clock)


def _strategies(config: ClusterConfig) -> list[DraftStrategy]:
    """What may be chosen, OFF always among it."""
    return list(dict.fromkeys((OFF, *(draft_strategy(c) for c in config.speculation.strategies))))


def _native_engine(
    config: ClusterConfig, engine: NativeEngineConfig, strategies: Sequence[DraftStrategy], slot: int, clock: Clock
) -> tuple[NativeEngine, Callable[[], None] | None]:
    """The engine, and what it has to do behind a load of weights."""
    torch.set_num_threads(engine.threads)
    needs_index = any(s.searched for s in config.speculation.strategies)
    spec, device = model_spec(read_config(model_dir(config.model.path))), pick_device(config.model.device)
    options = EngineOptions(
        max_running=engine.max_running,
        max_len=engine.max_len,
        max_nodes=max(s.num_draft_tokens for s in strategies),
        accept_threshold=config.speculation.accept_threshold if config.speculation.acceptance == "threshold" else 1.0,
        suffix_index=SuffixIndex(config.speculation.suffix_max_tokens) if needs_index else None,
        server=f"rollout-{slot}",
        capture_bytes=engine.capture_bytes if config.drafter.states == "engine" else 0,
        graphs=engine.graphs,
        graph_nodes=tuple(sorted({s.num_draft_tokens for s in strategies})),
        place=f"native on {device_name(device)}, {config.model.dtype}, {model_dir(config.model.path).name}",
    )
    target = TargetModel(spec, options.max_len + options.spare_columns, device, pick_dtype(config.model.dtype))
    selector = make_selector(config.speculation, random.Random(f"{config.run.seed}/selector/{slot}"))
    built = NativeEngine(target, options, selector, load_tokenizer(config.model.path).decode, clock)
    chosen = config.speculation.selector
    if not (isinstance(selector, Adaptive) and isinstance(chosen, AdaptiveSelector)):
        return built, None
    limits = Limits(engine.max_running, engine.max_len, spec.vocab_size, config.rollout.sampling.temperature)
    calibration = Calibration(selector, strategies, limits, clock, chosen.calibrate_s)
    return built, lambda: calibration.run_when_ready(built, options.suffix_index)
