"""The narrow face of a running SGLang engine that the adapter needs: plain values in, plain values out.

`launch.SGLangHandle` is the real one; tests use a fake with the same calls over a small real model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from services.core.selector import SelectorState
from services.core.types import SamplingParams, ServedVersions, StrategySpan
from services.rollout.sglang.captured import CapturedStates
from services.weights.parts import Incoming

Kind = Literal["policy", "drafter"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `window`: keep its hidden states. Requests find each other's prefixes within their window only, so
    that the states of a prefix that was not computed again are among those that are taken together."""

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request, everything since its start. `histogram[k]`: verify steps that accepted k draft tokens, as
    SGLang counts them (`meta_info.spec_correct_drafts_histogram`); empty without speculation; of an engine that
    switches between depths, laid out as in `rounds`. `finish` is SGLang's
    finish reason ("stop", "length", "abort"), None while it runs; `message` explains an abort."""

    rid: str
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    histogram: tuple[int, ...] = ()
    finish: str | None = None
    message: str = ""


class EngineHandle(Protocol):
    """Every call has its own time-out and says what it waited for (WaitTimeoutError)."""

    def submit(self, asked: Sequence[Asked]) -> None:
        """All at once, so that their prompts are computed together; does not wait for them."""

    def poll(self, wait_s: float) -> list[Update]:
        """All news so far; waits at most `wait_s` seconds for the first."""

    def abort(self, rid: str) -> None:
        """Drop one request; does not wait for it."""

    def abort_all(self) -> None:
        """Returns when nothing is left in the engine; later news of the dropped requests do not come."""

    def load(self, kind: Kind, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Adopt a version in place; running requests are held meanwhile and go on afterwards, whatever happens.
        WeightError when the engine refuses: a version in one part changed nothing, of one in several parts
        some may be in place, and `served` says so."""

    def receive(self, version: int, incoming: Incoming) -> None:
        """`load` of a policy that is still on its way: requests are held from its first part on. TransferError when it
        does not come; after its first part some may be in place then, and `served` says so."""

    def switch_memory(self, release: bool) -> None:
        """Give up the GPU memory of KV cache and weights (kept in host memory), or take it back; nothing may run."""

    def free_bytes(self) -> int:
        """Free memory of the engine's first GPU."""

    def capture_states(self, limit_bytes: int) -> None:
        """Set so many bytes of host memory aside for hidden states; 0 gives them back. ConfigError without an EAGLE
        drafter."""

    def take_states(self) -> CapturedStates:
        """What was kept since the last call, of requests with a window."""

    def force_depth(self, depth: int | None) -> None:
        """Draft to this depth in every round from the next one on; None: as the selector says. ConfigError for a depth
        that has not been captured."""

    def take_spans(self) -> tuple[StrategySpan, ...]:
        """What the selector chose since the last call, on this machine's monotonic clock."""

    def selector_state(self) -> SelectorState | None:
        """What the selector has learned; None of an engine that keeps its strategy."""

    def restore_selector(self, state: SelectorState) -> bool:
        """Let the selector go on from there; False when that does not fit it."""

    def served(self) -> ServedVersions:
        """Asked of the engine's own models, not remembered."""

    def close(self) -> None: ...
