"""Which prompts come next: shuffled epochs whose position is two integers, so that a resumed run goes on exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from random import Random

from services.core.errors import DataError
from services.core.types import Prompt


class PromptCursor:
    """Hands out prompts epoch by epoch, none twice within an epoch.

    When fewer than the asked number are left, the rest of the epoch is dropped and the next one starts: filling up
    from the next epoch could put a prompt twice in one step. The order depends on seed, epoch and the set of ids,
    not on the order in which the prompts were given.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = sorted(prompts, key=lambda prompt: prompt.id)
        self._seed = seed
        ids = [prompt.id for prompt in self._prompts]
        if len(set(ids)) != len(ids):
            raise DataError("the prompt set holds a prompt twice: remove duplicates (`longtail data check` names them)")
        self._fingerprint = hashlib.sha256("\n".join([str(seed), *ids]).encode()).hexdigest()[:16]
        self._start(epoch=0)

    def next(self, count: int) -> tuple[Prompt, ...]:
        """The next `count` prompts; raises DataError when the whole set has fewer."""
        assert count > 0
        if count > len(self._prompts):
            raise DataError(
                f"{count} different prompts are needed per step but the set has {len(self._prompts)}: "
                "add prompts or lower rollout.prompts_per_step"
            )
        if self._offset + count > len(self._order):
            self._start(self._epoch + 1)
        taken = self._order[self._offset : self._offset + count]
        self._offset += count
        return tuple(self._prompts[i] for i in taken)

    def state(self) -> dict[str, int | str]:
        """Position for a checkpoint; JSON-serialisable."""
        return {"epoch": self._epoch, "offset": self._offset, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Go on from `state`. Raises DataError for a state of other prompts or another seed: its position would
        silently skip prompts of this set."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the saved position belongs to another prompt set or seed: start a new run, or bring back its data"
            )
        self._start(int(state["epoch"]))
        self._offset = int(state["offset"])

    def _start(self, epoch: int) -> None:
        self._epoch, self._offset = epoch, 0
        self._order = list(range(len(self._prompts)))
        Random(f"{self._seed}/{epoch}").shuffle(self._order)
