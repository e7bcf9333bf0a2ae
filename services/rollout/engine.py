"""What the rollout server asks of an engine. Two implement it: the embedded one (`native`) and SGLang (`sglang/`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from services.core.selector import SelectorState
from services.core.types import (
    GroupWork,
    HiddenStateChunk,
    PartialRollout,
    Rollout,
    RunningRequest,
    ServedVersions,
    StrategySpan,
)
from services.models.hidden import HiddenStates
from services.rollout.request import Withdrawn
from services.speculation.gain import Predicts
from services.speculation.strategy import DraftStrategy
from services.weights.parts import Incoming


class RolloutEngine(Protocol):
    """Token-in/token-out generation with one owner; not thread-safe."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def versions(self) -> ServedVersions:
        """What the engine serves right now, as it said itself."""

    @property
    def last_strategy(self) -> DraftStrategy: ...

    @property
    def models(self) -> Predicts | None:
        """What its selector knows of costs and acceptance; None of one without models, or that knows too little."""

    def selector_state(self) -> SelectorState | None:
        """What its selector has learned; None of one that learns nothing."""

    def restore_selector(self, state: SelectorState) -> bool:
        """Let the selector go on from there; False when that is of another selector, or of another device or model."""

    def running(self) -> tuple[RunningRequest, ...]: ...

    @property
    def num_tokens(self) -> int:
        """Of all responses under way, what other servers generated of them included."""

    @property
    def prefilled(self) -> tuple[int, float]:
        """Tokens that were computed before the first new one, and at most how many seconds that took, since the engine
        was made."""

    def check(self, work: GroupWork) -> None:
        """RequestError naming the limit when this engine can never serve `work`."""

    def submit(self, work: Sequence[GroupWork]) -> None:
        """Queue all of it at once or, when `check` refuses a part, nothing. A rollout with a partial goes on from
        there; the rest is drawn with fresh random numbers that follow from its seed and the number of tokens already
        there."""

    def peek(self, rollout_ids: Collection[str]) -> tuple[PartialRollout, ...]:
        """What there is of these rollouts so far, which go on; those that do not run here are left out."""

    def withdraw(self, rollout_ids: Collection[str]) -> Withdrawn:
        """Stop these rollouts and hand back what there is of them; ids that do not run here are passed over."""

    def step(self, wait_s: float) -> list[Rollout]:
        """One round, or for an engine that runs by itself at most `wait_s` seconds of waiting for news; returns the
        rollouts that ended."""

    def abort(self) -> tuple[str, ...]:
        """Drop everything waiting and running; returns the dropped rollout ids."""

    @property
    def released(self) -> bool:
        """Whether its memory is lent out: it takes no work then."""

    def switch_memory(self, release: bool) -> int:
        """Give up the GPU memory of an engine that has nothing to do, or take it back: keys and values, which are lost,
        and where the engine can the weights, which survive. Returns bytes."""

    def load_policy(self, version: int, tensors: Mapping[str, Tensor]) -> None: ...

    def receive_policy(self, version: int, incoming: Incoming) -> None:
        """`load_policy` of weights that are still on their way; TransferError when they do not come."""

    def load_drafter(self, version: int, tensors: Mapping[str, Tensor]) -> None: ...

    def force_strategy(self, strategy: DraftStrategy | None) -> None:
        """Use one strategy from the next round on; None gives the choice back to the selector."""

    def take_spans(self) -> tuple[StrategySpan, ...]:
        """Which strategies ran since the last call and why, on the clock that the engine was made with; a bounded
        number of them."""

    def take_states(self, step: int) -> tuple[HiddenStateChunk, list[HiddenStates]]:
        """Hidden states of the rollouts that ended since the last call, of work that asked for them; `step` is noted on
        the chunk. ConfigError from an engine that keeps none."""
