"""Hidden states that the native engine keeps for the drafter: it computed them to generate."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from services.core.errors import ConfigError, RequestError
from services.core.types import GroupWork, HiddenStateChunk
from services.models.hidden import HiddenStates


class KeptStates:
    """Of responses that ended, until they are taken: at most `max_bytes`, the oldest make way. 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: deque[HiddenStates] = deque()
        self._num_bytes = self._lost_bytes = self._missing = 0

    def check(self, work: GroupWork) -> None:
        if work.keep_states and not self._max_bytes:
            raise RequestError(f"{work.group_id}: this engine keeps no hidden states: set drafter.states: engine")

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
            raise ConfigError("this engine keeps no hidden states: set drafter.states: engine")
        version = max((s.policy_version for s in self._kept), default=served)
        taken = [s for s in self._kept if s.policy_version == version and bool(s.loss_mask.any())]
        chunk = HiddenStateChunk(
            policy_version=version,
            step=step,
            num_sequences=len(taken),
            num_tokens=sum(len(s.input_ids) for s in taken),
            num_bytes=sum(s.num_bytes for s in taken),
            num_missing=self._missing + sum(s.policy_version != version for s in self._kept),
            lost_bytes=self._lost_bytes,
        )
        self.forget()
        return chunk, taken

    def forget(self) -> None:
        self._kept.clear()
        self._num_bytes = self._lost_bytes = self._missing = 0
