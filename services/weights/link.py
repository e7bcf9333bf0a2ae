"""A connection between two processes that hands bytes from one device to the other, and never waits for ever.

Each pair of policy trainer and rollout server has a process group of its own with two ranks: one that breaks is thrown
away, and no other pair hears of it. Every native call runs in a thread of its own, because it cannot be interrupted
from Python: whoever asked waits with a time-out, looks meanwhile whether the other side is there, and then aborts.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import psutil
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from services.core.errors import TransferError
from services.weights.mapped import MappedPair, room

T = TypeVar("T")
Look = Callable[[], None]
Backend = Literal["nccl", "ipc", "gloo"]

LOOK_S = 0.05  # between two looks at the other side, while waiting
LATER_S = 1.0  # by which native waits outlast those here, which say what was waited for
NEVER = timedelta(days=1)
HELLO = 1  # bytes each way through a new connection, so that it is known to work before anything depends on it

# Read by NCCL once in a process: one that has groups of its own needs them from its start.
NCCL_PAIR_ENV = {
    # Both sides must agree, or the import of the other's memory hangs; SGLang switches it off in its own processes.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",  # multicast has no use between two
}
# Also by torch, for each group.
NCCL_ENV = {
    # A broken connection must not end the process (torch's default): it is aborted here, and told.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    **NCCL_PAIR_ENV,
}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Where a side's weights lie: `gpu` is the card's UUID, None on a CPU; `nccl` its NCCL version, "" without."""

    gpu: str | None
    nccl: str

    @classmethod
    def of(cls, device: torch.device) -> DeviceFacts:
        if device.type != "cuda":
            return cls(None, "")
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return cls(str(torch.cuda.get_device_properties(device).uuid), version)


def choose_backend(one: DeviceFacts, other: DeviceFacts) -> Backend:
    """NCCL between two GPUs; it refuses two ranks on one, which map each other's memory instead. Two versions of NCCL
    do not understand each other; gloo then goes through host memory."""
    if one.gpu is None or other.gpu is None:
        return "gloo"
    if one.gpu == other.gpu:
        return "ipc"
    return "nccl" if one.nccl == other.nccl else "gloo"


def bounded(action: Callable[[], T], limit_s: float, look: Look, what: str) -> T:
    """What `action` returns. Raises TransferError when torch or a socket fails in it, or after `limit_s`, and whatever
    `look` raises; the action's thread is then left to itself."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(action())
        except (RuntimeError, ValueError, OSError) as error:  # torch's errors of connections are RuntimeErrors
            done.set_exception(TransferError(f"{what} failed: {first_line(error)}"))

    threading.Thread(target=run, name=what, daemon=True).start()
    give_up_s = time.monotonic() + limit_s
    while True:
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise TransferError(f"{what} did not finish within {limit_s:.0f} s")
        try:
            return done.result(min(LOOK_S, left_s))
        except TimeoutError:
            look()


class Link:
    """One side of a pair: `rank` 0 sends, 1 receives. `peer` is a socket to the other process that carries nothing but
    where memory is to be mapped: it closes when that process ends, which NCCL itself would not notice. Not thread-safe.
    """

    def __init__(self, backend: Backend, group: Any, rank: int, device: torch.device, peer: socket.socket) -> None:
        self.backend = backend
        self._group, self._other, self._device, self._peer = group, 1 - rank, device, peer
        # One for the link's life: torch has few, and gives the same one to several; a stuck transfer holds its own up.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        peer.setblocking(False)

    def stream(self) -> AbstractContextManager[object]:
        """Work on the link's device in here does not queue behind what the process does otherwise."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, buffer: Tensor, limit_s: float, look: Look) -> None:
        """All of `buffer` (bytes, contiguous), or TransferError; after an error the link is good for nothing."""
        self._transfer("send", buffer.to(self._staging), limit_s, look)

    def receive(self, num_bytes: int, limit_s: float, look: Look) -> Tensor:
        """So many bytes on the link's device, or TransferError as for `send`."""
        make = room if self.backend == "ipc" else _empty
        buffer = make(num_bytes, self._staging)
        self._transfer("recv", buffer, limit_s, look)
        return buffer.to(self._device)

    def hello(self, limit_s: float, look: Look) -> None:
        """The first bytes, both ways: NCCL connects here. Memory is mapped by the one that sends alone."""
        for sender in (0,) if self.backend == "ipc" else (0, 1):
            if self._other == 1 - sender:
                self.send(torch.zeros(HELLO, dtype=torch.uint8, device=self._device), limit_s, look)
            else:
                self.receive(HELLO, limit_s, look)

    @property
    def _staging(self) -> torch.device:
        return torch.device("cpu") if self.backend == "gloo" else self._device

    def _transfer(self, method: str, buffer: Tensor, limit_s: float, look: Look) -> None:
        if not buffer.numel():
            return
        group, ready = self._group, self._ready_event()

        def act() -> None:
            if self.backend == "gloo":
                getattr(group, method)([buffer], self._other, 0).wait(timedelta(seconds=limit_s + LATER_S))
                return
            if self.backend == "ipc":
                if ready is not None:
                    ready.synchronize()  # no stream of the other process waits for one of this
                with self.stream():
                    getattr(group, method)(buffer, limit_s + LATER_S)
                return
            with torch.cuda.device(self._device), self.stream():
                ready.wait()
                getattr(group, method)([buffer], self._other, 0).wait()  # a GPU's work: this only orders the stream
                torch.cuda.current_stream().synchronize()

        def look_at_both() -> None:
            look()
            self._look()

        word = "sending" if method == "send" else "receiving"
        bounded(act, limit_s, look_at_both, f"{word} {buffer.numel()} bytes over {self.backend}")

    def _ready_event(self) -> Any:
        """What the caller's stream still has to do to the buffer comes first."""
        if self._staging.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def alive(self) -> bool:
        """As far as this side's system knows."""
        return not _closed(self._peer)

    def _look(self) -> None:
        if not self.alive:
            raise TransferError("the other side closed the connection")

    def close(self) -> None:
        """Never waits for the other side, which notices."""
        self._peer.close()
        group, self._group = self._group, None
        if group is None:
            return

        def end() -> None:
            if self.backend == "nccl":
                group.abort()

        threading.Thread(target=end, name="closing a link", daemon=True).start()


def open_link(
    backend: Backend,
    store: Store,
    rank: int,
    host: str,
    device: torch.device,
    peer: socket.socket,
    limit_s: float,
    look: Look,
) -> Link:
    """Both sides call this at about the same time, with the same store behind it. `host` is this side's own address.
    Where the system lets no process see another's memory, both find that out, and gloo goes instead."""
    if backend == "ipc":
        link = Link(backend, MappedPair(peer, device), rank, device, peer)
        try:
            link.hello(limit_s, look)
        except TransferError as error:
            print(f"weights go through host memory: {error}", file=sys.stderr, flush=True)
            backend = "gloo"
        else:
            return link
    make = _nccl_group if backend == "nccl" else _gloo_group
    what = f"connecting over {backend}"
    link = Link(backend, bounded(lambda: make(store, rank, host, limit_s), limit_s, look, what), rank, device, peer)
    try:
        link.hello(limit_s, look)
    except TransferError:
        link.close()
        raise
    return link


def _gloo_group(store: Store, rank: int, host: str, limit_s: float) -> Any:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=limit_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # else it takes what the host's name says
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, options)


def _nccl_group(store: Store, rank: int, host: str, limit_s: float) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not there in torch's CPU packages

    os.environ.update(NCCL_ENV)
    interface = interface_of(host)
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    options = ProcessGroupNCCL.Options()
    options._timeout = NEVER  # of its watchdog: time is kept here, and the store has its own limit
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, 2, options)


def interface_of(host: str) -> str | None:
    """The network interface that has this address: NCCL would take the first that it finds."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return None


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""  # what is there may be meant for a transfer under way
    except BlockingIOError:
        return False
    except OSError:
        return True


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300].rstrip(".") or type(error).__name__
