"""Rewards: a finished group goes to the reward workers at once, while other groups still generate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from services.config.reward import RewardConfig
from services.coordinator.calls import Calls
from services.coordinator.fleet import PROBE_PAUSE_S, Patience
from services.coordinator.ledger import FinishedGroup
from services.core.errors import RewardError, ServiceLostError
from services.core.protocols import Clock, RewardClient
from services.core.texts import prompt_text, rollout_text
from services.core.types import Group, Reward, RunEvent

OWNER = "reward"


def check_errors(rewards: Sequence[Reward], max_fraction: float) -> None:
    """Raises RewardError when more than `max_fraction` of the verifications failed: a policy would learn from what is
    left, which is no fair sample of what it can do."""
    failed = Counter(r.error for r in rewards if r.error is not None)
    if failed.total() <= max_fraction * len(rewards):
        return
    (cause, count), *others = failed.most_common()
    raise RewardError(
        f"{failed.total()} of {len(rewards)} verifications failed, more than reward.max_error_fraction allows; "
        f"{count} times: {cause}" + (f"; and {len(others)} other causes" if others else "")
    )


class Scoring:
    def __init__(
        self,
        config: RewardConfig,
        client: RewardClient,
        calls: Calls,
        clock: Clock,
        patience: Patience,
        tell: Callable[[str, str, str], RunEvent],
    ) -> None:
        self._max_error_fraction = config.max_error_fraction
        self._client = client
        self._calls = calls
        self._clock = clock
        self._patience = patience
        self._tell = tell
        self._scored: dict[str, Group] = {}
        self._open: set[str] = set()
        self._lost = False

    def submit(self, group: FinishedGroup) -> None:
        self._open.add(group.group_id)
        self._ask(group, self._clock() + self._patience.restart_s)

    def collect(self) -> list[Group]:
        """Wait for every submitted group; all of them in group order, and start afresh."""
        while self._open:
            self._calls.turn()
        groups = [self._scored[group_id] for group_id in sorted(self._scored)]
        self._scored = {}
        check_errors([r for g in groups for r in g.rewards], self._max_error_fraction)
        return groups

    def _ask(self, group: FinishedGroup, give_up_s: float) -> None:
        def done(rewards: Sequence[Reward]) -> None:
            self._lost = False
            self._open.discard(group.group_id)
            self._scored[group.group_id] = Group(group.prompt, group.rollouts, tuple(rewards))

        def lost(reason: str) -> None:
            if not self._lost:
                self._lost = True
                self._tell("reward_lost", OWNER, f"reward workers are lost, asking again: {reason}")
            if self._clock() >= give_up_s:
                raise ServiceLostError(OWNER, f"{reason}; not back within {self._patience.restart_s:.0f} s")
            self._calls.later(PROBE_PAUSE_S, lambda: self._ask(group, give_up_s))

        rollouts = [rollout_text(rollout) for rollout in group.rollouts]
        pending = self._client.score([prompt_text(group.prompt)] * len(rollouts), rollouts)
        self._calls.post(OWNER, pending, done, lost, self._patience.call_s)
