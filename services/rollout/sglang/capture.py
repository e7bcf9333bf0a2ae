"""Keeping the target's hidden states while SGLang generates; runs inside SGLang's scheduler process (see `plugin`).

Prefill and verification hold the states on the GPU anyway, because the draft reads them. Each such call is copied as it
is, rejected rows included, into one arena of pinned host memory: states from its front, numbers (token ids, accepted
lengths, positions) from its back. Nothing here waits for the GPU: what a row means is found out by the reader (see
`captured`). The copies go into the stream that made the tensors: behind a forward pass their bytes are nothing, while a
stream beside it would cost every round a clone and two events. When the arena is full, nothing more is kept until it
has been taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from services.core.errors import BatchError
from services.rollout.sglang.captured import NUMBER, Call, Header, write_capture

KEEP = "longtail-states/"  # how the cache key of a request begins whose states are kept


class StateCapture:
    """One arena of `limit_bytes` for tensors of `device`, and the record of what lies where. A request is named by its
    rid, or None when its states are not wanted."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._device = device
        whole = limit_bytes // NUMBER.itemsize * NUMBER.itemsize
        self._arena = torch.empty(whole, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._numbers = self._arena.view(NUMBER)
        self._fault = ""
        self._shape: tuple[int, torch.dtype] | None = None  # width of a row and its dtype: one model, one shape
        self._clear()

    def _clear(self) -> None:
        self._calls: list[Call] = []
        self._rids: dict[str, int] = {}
        self._rows, self._low = 0, len(self._numbers)  # rows used from the front, numbers from `_low` on
        self._full = False
        self._cut: set[str] = set()
        self._void: set[str] = set()
        self._lost_bytes = 0

    def prefill(
        self,
        rids: Sequence[str | None],
        starts: Sequence[int],
        counts: Sequence[int],
        version: int,
        states: Tensor,
        ids: Tensor,
        next_ids: Tensor,
    ) -> None:
        """A prefill of counts[i] tokens of request i from position starts[i] on: states [sum(counts),H], their ids
        [sum(counts)], and what was drawn behind each request's last one [len(rids)]. A prefill that finds no room
        voids what was kept of its requests: it may be their second one, after a load."""
        rows = sum(counts)
        if (len(states), ids.numel(), next_ids.numel(), len(starts)) != (rows, rows, len(rids), len(rids)):
            self._fail(f"a prefill of {rows} tokens in {len(rids)} requests", states, ids, next_ids)
        elif not self._keep(rids, version, states, (ids, next_ids), starts, counts):
            self._void.update(rid for rid in rids if rid is not None)

    def decode(
        self,
        rids: Sequence[str | None],
        version: int,
        states: Tensor,
        predicted: Tensor,
        accept_lens: Tensor,
        seq_lens: Tensor,
    ) -> None:
        """A verification of W nodes per request: states [B*W,H], accepted path first; predicted [B*W], the token behind
        each node; accept_lens [B], nodes that were accepted, root included; seq_lens [B], the root's position."""
        lengths = accept_lens.numel(), seq_lens.numel()
        if lengths != (len(rids), len(rids)) or len(states) % len(rids) or predicted.numel() != len(states):
            self._fail(f"a verification of {len(rids)} requests", states, predicted, accept_lens, seq_lens)
        elif not self._keep(rids, version, states, (predicted, accept_lens, seq_lens), (), ()):
            self._cut.update(rid for rid in rids if rid is not None)

    def _keep(
        self,
        rids: Sequence[str | None],
        version: int,
        states: Tensor,
        numbers: Sequence[Tensor],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> bool:
        """False when there is no room."""
        shape = (states.shape[1], states.dtype)
        if self._shape not in (None, shape):
            self._fail(f"states of {self._shape}", states)
            return True
        self._shape = shape
        row_bytes = shape[0] * states.element_size()
        count = sum(t.numel() for t in numbers)
        end = (self._rows + len(states)) * row_bytes
        low = self._low - count
        if self._full or end > low * NUMBER.itemsize:
            self._full = True
            if any(rid is not None for rid in rids):
                self._lost_bytes += len(states) * row_bytes
            return False
        places = self._arena[end - len(states) * row_bytes : end].view(states.dtype).view(-1, shape[0])
        flat = torch.cat([t.reshape(-1) for t in numbers]).to(NUMBER)
        places.copy_(states, non_blocking=True)
        self._numbers[low : self._low].copy_(flat, non_blocking=True)
        known = [-1 if rid is None else self._rids.setdefault(rid, len(self._rids)) for rid in rids]
        self._calls.append(Call(version, self._rows, len(states), low, known, list(starts), list(counts)))
        self._rows, self._low = self._rows + len(states), low
        return True

    def _fail(self, what: str, *found: Tensor) -> None:
        """An exception here would end the scheduler's process: whoever takes the states hears of it."""
        self._fault = f"{what} came with tensors of {[tuple(t.shape) for t in found]}, {found[0].dtype}"
        self._full = True

    def take(self, path: str, engine: str) -> None:
        """Write all that was kept into the file at `path` and begin anew. `engine` names SGLang and its version. The
        file's name goes at once: whoever made it has it open. Raises BatchError when SGLang's tensors had other shapes
        than this module knows."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies have arrived
        if self._fault:
            raise BatchError(f"hidden states cannot be kept: {self._fault}")
        width, dtype = self._shape or (0, torch.float32)
        header = Header(
            engine=engine,
            rids=list(self._rids),
            calls=[asdict(call) for call in self._calls],
            dtype=str(dtype).removeprefix("torch."),
            width=width,
            rows=self._rows,
            low=self._low,
            cut=sorted(self._cut - self._void),
            void=sorted(self._void),
            lost_bytes=self._lost_bytes,
        )
        used = self._rows * width * dtype.itemsize
        write_capture(path, header, self._arena[:used], self._arena[self._low * NUMBER.itemsize :])
        self._clear()
