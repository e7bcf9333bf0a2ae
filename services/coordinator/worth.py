"""Whether training the drafter pays, and how many idle slots should do it. Pure.

Two signs say that it does: what was learned in the last steps made drafts better on rollouts nobody had trained on
(`gain`), or the served drafter is accepted less than it was (`drift`), measured per bucket of response length against
the bucket's own recent level, since long responses are accepted differently and their share changes from step to
step. Without either, slots rest and the energy is saved (a frozen drafter holds up well when the policy moves slowly);
now and then one step of training asks again. Hidden states, which are not for nothing either, are kept only around
such steps (3 billion parameters on two H200s: 1.1 to 3.9 s a step where the policy's team keeps them). tlt.md section 7
and the paper train by the clock instead, which is `when: always` with `every`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.config.drafter import DrafterTraining
from services.core.types import AcceptanceStats, Rollout

_PLAIN = ("_idle_gains", "_rested", "_gain", "_dropped", "resting")  # attributes of a state
LEVEL_SHARE = 0.3  # of the newest step in a bucket's level


def bucket(rollout: Rollout) -> int:
    """Responses of a length of the same power of two."""
    return len(rollout.response_ids).bit_length()


@dataclass
class DriftWatch:
    """Acceptance per bucket against its own level (an exponential average of earlier steps)."""

    levels: dict[int, float] = field(default_factory=dict)

    def step(self, rollouts: Iterable[Rollout]) -> float:
        """The drop of acceptance relative to the levels, averaged over buckets by verify steps (positive: worse), and
        the levels move on. 0 where nothing can be compared."""
        parts: dict[int, list[AcceptanceStats]] = {}
        for rollout in rollouts:
            parts.setdefault(bucket(rollout), []).append(rollout.acceptance)
        dropped = weight = 0.0
        for key, stats in parts.items():
            merged = AcceptanceStats.merged(stats)
            length = merged.acceptance_length
            if length is None:
                continue
            level = self.levels.get(key)
            if level is not None:
                dropped += merged.verify_steps * (1 - length / level)
                weight += merged.verify_steps
            self.levels[key] = length if level is None else level + LEVEL_SHARE * (length - level)
        return dropped / weight if weight else 0.0


class Worth:
    """Told after every step; asked before every rollout phase."""

    def __init__(self, config: DrafterTraining) -> None:
        self._config = config
        self._drift = DriftWatch()
        self._idle_gains = 0  # evaluated trainings in a row that brought too little
        self._rested = 0  # steps since training stopped
        self._gain: float | None = None
        self._dropped = 0.0
        self.resting = False

    def step(self, rollouts: Sequence[Rollout], gain: float | None) -> str | None:
        """`gain`: what this step's training added to the held-out acceptance length, relative; None when nothing was
        trained or evaluated. Returns a message when training begins to rest, or goes on again."""
        self._dropped = self._drift.step(rollouts)
        self._gain = gain
        if gain is not None:
            self._idle_gains = 0 if gain >= self._config.min_gain else self._idle_gains + 1
        return self._rest() if not self.resting else self._wake()

    def _rest(self) -> str | None:
        if self._idle_gains < self._config.patience or self._drifts:
            return None
        self.resting, self._rested = True, 0
        return (
            f"the served drafter holds: {self._idle_gains} trainings in a row added less than "
            f"{self._config.min_gain:.1%} to the held-out acceptance length, which has not dropped; slots rest, and "
            f"one step in {self._config.probe_every} tries again"
        )

    def _wake(self) -> str | None:
        self._rested += 1
        pays = self._gain is not None and self._gain >= self._config.min_gain
        if not (pays or self._drifts):
            return None
        self.resting, self._idle_gains = False, 0
        if pays:
            return f"training the drafter pays again: it added {self._gain:.1%} to the held-out acceptance length"
        return f"training the drafter again: acceptance dropped {self._dropped:.1%} below its recent level"

    def state(self) -> dict[str, Any]:
        """All that it knows, as plain values."""
        return {"levels": sorted(self._drift.levels.items()), **{name: getattr(self, name) for name in _PLAIN}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` said."""
        self._drift.levels = dict(state["levels"])
        for name in _PLAIN:
            setattr(self, name, state[name])

    @property
    def _drifts(self) -> bool:
        return self._dropped >= self._config.drift

    def slots(self, idle: int, step: int) -> int:
        """How many of `idle` slots should train in the phases of `step`, the coming one."""
        if self._config.when != "auto":
            return idle if self._in_turn(step) else 0
        if self.resting:
            return min(1, idle) if self._due(self._rested) else 0
        barely = self._gain is not None and self._gain < self._config.min_gain and not self._drifts
        return min(1, idle) if barely else idle

    def wants_states(self, step: int) -> bool:
        """Whether hidden states of `step`, the coming one, are of use: to train on in its tail or the next one's, or to
        judge what its tail has learned."""
        if self._config.when != "auto":
            return self._in_turn(step) or self._in_turn(step + 1)
        return not self.resting or self._due(self._rested) or self._due(self._rested + 1)

    def _in_turn(self, step: int) -> bool:
        return self._config.when == "always" and step % self._config.every == 0

    def _due(self, rested: int) -> bool:
        return rested > 0 and rested % self._config.probe_every == 0
