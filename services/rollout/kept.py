"""Hidden states that the native engine keeps for the drafter: it computed them to generate."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from services.core.errors import ConfigError
from services.core.types import GroupWork, HiddenStateChunk
from services.models.hidden import HiddenStates, chunk_of
from services.rollout.request import KEEPS_NONE, check_keeps


class KeptStates:
    """Of responses that ended, until they are taken: at most `max_bytes`, the oldest make way. 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: deque[HiddenStates] = deque()
        self._num_bytes = self._lost_bytes = self._missing = 0

    def check(self, work: GroupWork) -> None:
        check_keeps(work, self._max_bytes)

    def keep(self, ids: Sequence[int], hidden: Tensor, num_prompt: int, version: int) -> None:
        """`ids` of prompt and response; `hidden` [T-1,H] of all but the last, which the target never saw. A copy."""
        states = HiddenStates(
            torch.tensor(ids[:-1]), hidden.to("cpu", copy=True), torch.arange(len(ids) - 1) >= num_prompt, version
        )
        self._kept.append(states)
        self._num_bytes += states.num_bytes
        while self._num_bytes > self._max_bytes:
            gone = self._kept.popleft().num_bytes
            self._num_bytes -= gone
            self._lost_bytes += gone
            self._missing += 1

    def take(self, step: int, served: int) -> tuple[HiddenStateChunk, list[HiddenStates]]:
        """All of the newest policy version (`served` when there are none), and forget the rest: a chunk is for one."""
        if not self._max_bytes:
            raise ConfigError(KEEPS_NONE)
        version = max((s.policy_version for s in self._kept), default=served)
        taken = [s for s in self._kept if s.policy_version == version and bool(s.loss_mask.any())]
        missing = self._missing + sum(s.policy_version != version for s in self._kept)
        chunk = chunk_of(taken, version, step, missing, self._lost_bytes)
        self.forget()
        return chunk, taken

    def forget(self) -> None:
        self._kept.clear()
        self._num_bytes = self._lost_bytes = self._missing = 0
