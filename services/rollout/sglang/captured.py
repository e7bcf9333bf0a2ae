"""The file in which captured hidden states leave SGLang's scheduler process, and what they are on the other side.

length of the header | header (JSON) | padding | states, row behind row | numbers (int64)
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.core.errors import BatchError

NUMBER = torch.int64
ALIGNED = 64  # bytes
SHARED_MEMORY = Path("/dev/shm")
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Call:
    """One forward pass of the target: rows [row, row + rows) and the numbers from `number` on. `requests`: indices into
    the header's rids, -1 for a request whose states nobody wants. A prefill has `starts` and `counts`; its numbers are
    the ids of all rows and the token behind each request's last one. A verification has neither; its numbers are the
    token behind each row, the accepted lengths and the roots' positions."""

    version: int
    row: int
    rows: int
    number: int
    requests: list[int]
    starts: list[int]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class Header:
    """`low`: the first number's index in the arena; `cut` and `void`: requests of whose states only the first part, or
    nothing that holds, found room."""

    engine: str
    rids: list[str]
    calls: list[dict[str, Any]]
    dtype: str
    width: int
    rows: int
    low: int
    cut: list[str]
    void: list[str]
    lost_bytes: int


@dataclass(frozen=True)
class CapturedStates:
    """States of many requests as they were computed: states [R,H] (memory-mapped), behind int64 [R], the token behind
    each row's own, -1 where it is not known. Runs of rows, in the order of computing, int64 [S] each: `count` rows from
    `first_row` on belong to `request` (index into `rids`) at positions `start`.. under policy `version`. A later run of
    a request takes the place of everything it had at that position and behind."""

    engine: str
    rids: tuple[str, ...]
    states: Tensor
    behind: Ints
    request: Ints
    start: Ints
    first_row: Ints
    count: Ints
    version: Ints
    cut: frozenset[str] = frozenset()
    void: frozenset[str] = frozenset()
    lost_bytes: int = 0


def write_capture(path: str, header: Header, states: Tensor, numbers: Tensor) -> None:
    """`states` and `numbers` as uint8 in host memory. The file's name goes before anything is in it."""
    text = json.dumps(asdict(header)).encode()
    text += b" " * (-(len(text) + 8) % ALIGNED)
    with open(path, "r+b") as file:
        os.unlink(path)
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for part in (states, numbers):
            file.write(part.numpy().data)


@contextmanager
def capture_file() -> Iterator[tuple[str, int]]:
    """(path, descriptor) of an empty file in memory, for one transfer; nothing of it stays, whatever happens."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    descriptor, path = tempfile.mkstemp(prefix="longtail-states-", dir=folder)
    try:
        yield path, descriptor
    finally:
        os.close(descriptor)
        Path(path).unlink(missing_ok=True)


def read_capture(descriptor: int) -> CapturedStates:
    """Maps the file; the mapping lives as long as the states do. Raises BatchError for lengths that cannot be."""
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    size = int.from_bytes(mapped[:8], "little")
    header = Header(**json.loads(mapped[8 : 8 + size]))
    dtype: torch.dtype = getattr(torch, header.dtype)
    data = torch.frombuffer(mapped, dtype=torch.uint8)[8 + size :]
    split = header.rows * header.width * dtype.itemsize
    states = data[:split].view(dtype).view(header.rows, header.width)
    numbers: Ints = np.frombuffer(data[split:].numpy().tobytes(), dtype=np.int64)
    return _Reader(header, numbers).captured(states)


class _Reader:
    """From calls to runs of rows."""

    def __init__(self, header: Header, numbers: Ints) -> None:
        self._header, self._numbers = header, numbers
        self._behind = np.full(header.rows, -1, dtype=np.int64)
        self._runs: list[Ints] = []  # [5,n]: request, start, first_row, count, version
        self._tails: dict[int, int] = {}  # request -> last row of its last run, if that was a prefill

    def captured(self, states: Tensor) -> CapturedStates:
        for call in (Call(**c) for c in self._header.calls):
            if call.counts:
                self._prefill(call)
            else:
                self._verification(call)
        runs = np.concatenate(self._runs, axis=1) if self._runs else np.zeros((5, 0), dtype=np.int64)
        head = self._header
        return CapturedStates(
            engine=head.engine,
            rids=tuple(head.rids),
            states=states,
            behind=self._behind,
            request=runs[0],
            start=runs[1],
            first_row=runs[2],
            count=runs[3],
            version=runs[4],
            cut=frozenset(head.cut),
            void=frozenset(head.void),
            lost_bytes=head.lost_bytes,
        )

    def _take(self, call: Call, count: int, at: int) -> Ints:
        first = call.number - self._header.low + at
        return self._numbers[first : first + count]

    def _add(self, call: Call, start: Ints, first_row: Ints, count: Ints) -> None:
        requests = np.array(call.requests)
        runs = np.stack([requests, start, first_row, count, np.full_like(start, call.version)])
        self._runs.append(runs[:, requests >= 0])

    def _prefill(self, call: Call) -> None:
        counts = np.array(call.counts)
        ends = np.cumsum(counts)
        behind = np.roll(self._take(call, call.rows, 0), -1)
        behind[ends - 1] = self._take(call, len(counts), call.rows)
        self._behind[call.row : call.row + call.rows] = behind
        self._add(call, np.array(call.starts), call.row + ends - counts, counts)
        for request, end in zip(call.requests, ends.tolist(), strict=True):
            last = self._tails.get(request)
            if last is not None:  # what SGLang draws behind a chunk that is not the prompt's last is nobody's token
                self._behind[last] = -1
            self._tails[request] = call.row + end - 1

    def _verification(self, call: Call) -> None:
        batch = len(call.requests)
        width = call.rows // batch
        accepted, start = (self._take(call, batch, call.rows + i * batch) for i in range(2))
        if accepted.min() < 1 or accepted.max() > width or start.min() < 0:
            raise BatchError(
                f"{self._header.engine} accepted {accepted.tolist()} of {width} nodes at {start.tolist()}: the hidden "
                "states are not laid out as this version of Longtail knows them: set drafter.states: policy"
            )
        self._behind[call.row : call.row + call.rows] = self._take(call, call.rows, 0)
        self._add(call, start, call.row + np.arange(batch) * width, accepted)
        for request in call.requests:
            self._tails.pop(request, None)
