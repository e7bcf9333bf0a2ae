"""The target's pass over the nodes of all rows, run as it stands or replayed from a CUDA graph of a size that holds it.

A graph reads fixed addresses: the inputs are copied into its own, the rows' stores move only when their memory is lent
out, and then no graph is kept, and a load of weights writes into the tensors that are there. Padding rows are rows that
no request has: what they write is nobody's. What capturing writes goes to the last columns, which no token of a request
reaches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from services.config.graphs import GraphsConfig
from services.core.errors import ConfigError
from services.rollout.graphs import GraphBook, GraphPart, GraphSizes, PassSize
from services.rollout.memory import GpuMemory, gpu_memory, taken_since
from services.rollout.rows import Rows, causal_table, tail_mask


class PassInputs(NamedTuple):
    """ids int64 [B,Q] of the nodes, base int64 [B] the root's column, depths int64 [Q], table [Q,Q+2] as of
    `tail_table`."""

    ids: Tensor
    base: Tensor
    depths: Tensor
    table: Tensor


Pass = Callable[[PassInputs], Tensor]


class Capture(Protocol):
    def __call__(self, run: Pass, inputs: PassInputs) -> Callable[[], Tensor]:
        """What computes `run(inputs)` anew from what `inputs` hold then; its result is valid until the next call."""


def target_pass(rows: Rows, given: PassInputs, columns: int) -> Tensor:
    """Keeps keys, values and hidden states of all nodes; attention reads `columns`. Returns last hidden [B,Q,H]."""
    batch, nodes = given.ids.shape
    write_at = given.base[:, None] + torch.arange(nodes, device=given.base.device)
    positions = given.base[:, None] + given.depths
    mask = tail_mask(given.base, given.table, columns)
    hidden = rows.target.forward(given.ids, positions, rows.kv, write_at, mask)
    rows.hidden[rows.index_of(batch), write_at] = hidden
    return hidden


def padded(given: PassInputs, size: PassSize) -> PassInputs:
    """Rows and nodes up to `size`. A padding row has no context; a padding node sees its row's context and itself,
    and lies behind all real ones, where nothing looks."""
    batch, nodes = given.ids.shape
    more = size.nodes - nodes
    own = torch.zeros(more, size.nodes + 2, dtype=given.table.dtype, device=given.table.device)
    own[:, 1:] = -torch.inf
    own.diagonal(nodes + 1).zero_()
    return PassInputs(
        F.pad(given.ids, (0, more, 0, size.batch - batch)),
        F.pad(given.base, (0, size.batch - batch)),
        F.pad(given.depths, (0, more)),
        torch.cat([F.pad(given.table, (0, more), value=-torch.inf), own]),
    )


def scratch(rows: Rows, size: PassSize) -> PassInputs:
    """Inputs of this size that leave all requests as they are: `size.nodes` in a row in the last columns."""
    device, columns = rows.target.device, rows.tokens.shape[1]
    return PassInputs(
        torch.zeros(size.batch, size.nodes, dtype=torch.long, device=device),
        torch.full((size.batch,), columns - size.nodes, device=device),
        torch.arange(size.nodes, device=device),
        causal_table(size.nodes, rows.target.dtype, device).clone(),
    )


class CudaCapture:
    """All graphs share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Pass, inputs: PassInputs) -> Callable[[], Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run(inputs)  # what libraries set up at first use cannot be captured
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = run(inputs)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class _Captured(NamedTuple):
    inputs: PassInputs
    replay: Callable[[], Tensor]


class PassGraphs:
    """The graphs of one engine's target, captured as they are needed."""

    def __init__(
        self,
        rows: Rows,
        sizes: GraphSizes,
        memory_bytes: int,
        capture: Capture,
        memory: Callable[[], GpuMemory] = gpu_memory,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._rows, self._sizes, self._capture = rows, sizes, capture
        self._memory, self._say = memory, say
        self._book = GraphBook(memory_bytes)
        self._captured: dict[PassSize, _Captured] = {}
        self.replayed = 0  # passes

    def parts(self) -> tuple[GraphPart, ...]:
        return self._book.parts()

    def run(self, given: PassInputs, context: int) -> Tensor | None:
        """`target_pass` behind at most `context` columns: [B,Q,H], valid until the next call; None where there is no
        graph for it."""
        batch, nodes = given.ids.shape
        size = self._sizes.covering(batch, nodes, context)
        if size is None:
            return None
        found = self._captured.get(size)
        if found is None:
            self._book.asked(size)
            return None
        for own, new in zip(found.inputs, padded(given, size), strict=True):
            own.copy_(new)
        self.replayed += 1
        return found.replay()[:batch, :nodes]

    def forget(self) -> None:
        """Give all graphs and their memory up: the rows' stores are about to move."""
        self._captured.clear()
        self._book = self._book.emptied()

    @torch.no_grad()
    def capture_due(self) -> None:
        """Of the sizes that came again. Between rounds: what it costs is no part of any strategy's time."""
        while (size := self._book.due()) is not None:
            self._add(size)

    def _add(self, size: PassSize) -> None:
        before, began_s, inputs = self._memory(), time.perf_counter(), scratch(self._rows, size)
        replay = self._capture(lambda given: target_pass(self._rows, given, size.columns), inputs)
        self._captured[size] = _Captured(inputs, replay)
        seconds = time.perf_counter() - began_s
        taken = taken_since(before, self._memory())
        self._book.captured(size, taken, seconds)
        parts = ", ".join(f"{p.device_bytes / 2**20:.0f} MiB for {p.nodes} nodes" for p in self.parts())
        self._say(f"CUDA graph of {size.batch} rows x {size.nodes} nodes, {size.columns} columns; graphs take {parts}")


def cuda_graphs(rows: Rows, config: GraphsConfig, nodes: Sequence[int], server: str) -> PassGraphs:
    """For strategies of so many nodes each; `server` tells on stderr what is captured. ConfigError where the target is
    not on a CUDA device."""

    def say(line: str) -> None:
        print(f"{server}: {line}", file=sys.stderr, flush=True)

    if rows.target.device.type != "cuda":
        raise ConfigError(
            f"rollout.engine.graphs needs a CUDA device, and the model is on {rows.target.device.type}: leave it out"
        )
    max_running, max_columns = rows.tokens.shape
    sizes = GraphSizes(max_running, max_columns, tuple(nodes), min(config.max_nodes, config.free_nodes), config.step)
    return PassGraphs(rows, sizes, config.memory_bytes, CudaCapture(), say=say)
