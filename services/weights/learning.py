"""What an engine asks of whoever learns from the responses that it serves, while it has nothing to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.core.serving import LearningView
from services.models.hidden import HiddenStates


@dataclass(frozen=True)
class NewDrafter:
    """A drafter that is better than the one served, under the version that nobody else has."""

    version: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Spare:
    """What a piece of work came to. `found`: to be served from now on. `more`: there is more to do at once."""

    more: bool
    found: NewDrafter | None = None


class Learner(Protocol):
    """Called from the engine's thread alone; no call takes longer than a micro-step of training."""

    def begin(self, policy_version: int, policy: Mapping[str, Tensor], drafter: NewDrafter) -> None:
        """These are served now: forget what was kept of another policy, and begin from this drafter."""

    def add(self, states: Sequence[HiddenStates]) -> None:
        """Responses of the policy that is served."""

    def work(self) -> Spare:
        """A micro-step, or a part of an exam of about that size."""

    def view(self) -> LearningView: ...

    def close(self) -> None:
        """Wait for what is being written."""
