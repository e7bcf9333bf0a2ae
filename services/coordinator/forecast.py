"""What the next step is expected to gain from drafting, asked from the servers while the policy is trained."""

from __future__ import annotations

from collections.abc import Sequence

from services.coordinator.calls import Calls
from services.coordinator.stats import mean
from services.core.gain import ExpectedGain, Workload
from services.core.protocols import RolloutClient
from services.core.types import Group, SamplingParams


class Forecast:
    """The servers know costs and acceptance, the coordinator the last step's lengths, which are the best guess at the
    next one's. `gain` is of the step to come; None while nobody has said."""

    def __init__(
        self, servers: Sequence[RolloutClient], calls: Calls, capacity: int, sampling: SamplingParams, timeout_s: float
    ) -> None:
        self._servers, self._calls, self._timeout_s = servers, calls, timeout_s
        self._capacity, self._temperature = capacity, sampling.temperature
        self._answers: dict[int, ExpectedGain | None] = {}

    @property
    def gain(self) -> float | None:
        """Of all servers that predict together. A server that does not (its selector has no models) is left out."""
        summed = ExpectedGain.summed(a for a in self._answers.values() if a is not None)
        return summed.ratio if summed else None

    def ask(self, groups: Sequence[Group], slots: Sequence[int]) -> None:
        """Ask the servers of these slots. What they do not answer before the next step stays unknown: the next time
        a lost one is opened tells of its loss."""
        self._answers = {}
        for place, slot in enumerate(slots):
            work = self._work(groups[place :: len(slots)])
            if work is not None:
                self._ask_one(slot, work)

    def _work(self, groups: Sequence[Group]) -> Workload | None:
        """As if the servers had taken the groups in turn."""
        rollouts = [r for group in groups for r in group.rollouts]
        if not rollouts:
            return None
        return Workload(
            lengths=tuple(max(1, len(r.response_ids)) for r in rollouts),
            group_size=max(len(g.rollouts) for g in groups),
            prompt_tokens=mean([len(r.prompt_ids) for r in rollouts]),
            capacity=self._capacity,
            temperature=self._temperature,
        )

    def _ask_one(self, slot: int, work: Workload) -> None:
        client, answers = self._servers[slot], self._answers

        def told(answer: ExpectedGain | None) -> None:
            answers[slot] = answer

        self._calls.post(client.name, client.predict_gain(work), told, lambda reason: None, self._timeout_s)
