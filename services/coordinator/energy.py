"""Which role spent a GPU's joules. Pure.

The joules between two moments are the difference of the GPU's counter, interpolated between its samples. At every
moment they belong to whoever works on the GPU: slots in ROLLOUT, DRAINING or DRAFTING, and the policy trainer in its
spans. Several that work at once share equally, so over time each gets joules in proportion to how long it overlapped
with the others. When nobody works, a LOST slot has them, else they are idle. A GPU that only the policy trainer uses
is the policy's all the time, also while it waits. Over all roles the sum is the difference of the counters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.core.types import SlotSpan, SlotState

POLICY = "policy"  # the holder's name in the spans, and its role
ROLES = tuple(state.value for state in SlotState)
_IDLE, _LOST = SlotState.IDLE.value, SlotState.LOST.value
_WORKING = frozenset(ROLES) - {_IDLE, _LOST}


@dataclass(frozen=True, slots=True)
class EnergyCurve:
    """Joules of one GPU (any zero, never falling) at rising times, in run seconds. Before the first sample and after
    the last one it is flat."""

    times_s: Sequence[float]
    joules: Sequence[float]

    def covers(self, start_s: float, end_s: float, slack_s: float) -> bool:
        """Whether there are samples from `start_s` to `end_s`, but for `slack_s` at either end."""
        times = self.times_s
        return bool(times) and times[0] <= start_s + slack_s and times[-1] >= end_s - slack_s

    def at(self, seconds: float) -> float:
        times, joules = self.times_s, self.joules
        right = bisect_right(times, seconds)
        if right == 0:
            return joules[0]
        if right == len(times):
            return joules[-1]
        share = (seconds - times[right - 1]) / (times[right] - times[right - 1])
        return joules[right - 1] + share * (joules[right] - joules[right - 1])


def energy_by_role(
    curves: Mapping[str, EnergyCurve],
    spans: Sequence[SlotSpan],
    users: Mapping[str, Collection[str]],
    start_s: float,
    end_s: float,
) -> dict[str, float]:
    """Joules from `start_s` to `end_s` by role, all six of them, summed over GPUs.

    `curves` by GPU. `users`: the GPUs of each holder, named as in the spans ("slot 0", "policy"); spans of holders
    without GPUs, such as the reward workers, do not count.
    """
    assert start_s <= end_s
    total = dict.fromkeys(ROLES, 0.0)
    for gpu, curve in curves.items():
        holders = {holder for holder, gpus in users.items() if gpu in gpus}
        if holders == {POLICY}:
            total[POLICY] += curve.at(end_s) - curve.at(start_s)
            continue
        mine = [s for s in spans if s.slot in holders and s.end_s > start_s and s.start_s < end_s]
        for role, joules in _shared_out(curve, mine, start_s, end_s).items():
            total[role] += joules
    return total


def _shared_out(curve: EnergyCurve, spans: Sequence[SlotSpan], start_s: float, end_s: float) -> dict[str, float]:
    """Walks over the moments at which a span begins or ends."""
    edges = sorted(
        [(max(s.start_s, start_s), 1, s.role) for s in spans] + [(min(s.end_s, end_s), -1, s.role) for s in spans]
    )
    present: Counter[str] = Counter()
    joules = dict.fromkeys(ROLES, 0.0)
    before = curve.at(start_s)
    for at, change, role in [*edges, (end_s, 0, _IDLE)]:
        now = curve.at(at)
        for holder, share in _shares(present).items():
            joules[holder] += share * (now - before)
        before = now
        present[role] += change
    return joules


def _shares(present: Mapping[str, int]) -> dict[str, float]:
    """The part of each role at a moment when so many spans of each are open; they sum to one."""
    working = {role: count for role, count in present.items() if count and role in _WORKING}
    if working:
        everyone = sum(working.values())
        return {role: count / everyone for role, count in working.items()}
    return {_LOST: 1.0} if present.get(_LOST) else {_IDLE: 1.0}
