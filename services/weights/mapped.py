"""Bytes from one process to another on the same device: the receiver sets memory aside and says where, the sender maps
it into its own process and writes. Nothing passes through host memory.

It is the receiver that exports: CUDA hands out no handles of the growing segments that trainers allocate from.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from services.weights.parts import bytes_of

LENGTH_BYTES = 4  # in front of a handle; a length of 0: there is none
WRITTEN, REFUSED = b"\n", b"!"


def room(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] that another process can map."""
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return bytes_of(UntypedStorage._new_using_filename_cpu(num_bytes))


def exported(buffer: Tensor) -> bytes:
    storage: Any = buffer.untyped_storage()
    facts = storage._share_cuda_() if buffer.device.type == "cuda" else storage._share_filename_cpu_()
    return json.dumps([{"hex": fact.hex()} if isinstance(fact, bytes) else fact for fact in facts]).encode()


def mapped(handle: bytes, device: torch.device) -> Tensor:
    """What `exported` names, as this process sees it. Raises RuntimeError where the system does not allow it."""
    facts = [bytes.fromhex(fact["hex"]) if isinstance(fact, dict) else fact for fact in json.loads(handle)]
    if device.type == "cuda":
        # The other process may count the GPUs that it sees differently.
        storage = UntypedStorage._new_shared_cuda(torch.cuda._utils._get_device_index(device, True), *facts[1:])
    else:
        storage = UntypedStorage._new_shared_filename_cpu(*facts)
    return bytes_of(storage)


class MappedPair:
    """One side's end of `peer`, a socket that does not block; each call has a limit in seconds. OSError and
    RuntimeError, as from torch's process groups."""

    def __init__(self, peer: socket.socket, device: torch.device) -> None:
        self._peer, self._device = peer, device

    def send(self, buffer: Tensor, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        length = int.from_bytes(self._read(LENGTH_BYTES, end_s), "big")
        if not length:
            raise RuntimeError("the receiver could not hand out its memory")
        handle = self._read(length, end_s)
        try:
            mapped(handle, self._device)[: buffer.numel()].copy_(buffer)  # and no name: it would stay mapped
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError:
            self._peer.sendall(REFUSED)
            raise
        self._peer.sendall(WRITTEN)

    def recv(self, buffer: Tensor, limit_s: float) -> None:
        """`buffer` is of `room`."""
        try:
            handle = exported(buffer)
        except RuntimeError:
            self._peer.sendall(bytes(LENGTH_BYTES))
            raise
        self._peer.sendall(len(handle).to_bytes(LENGTH_BYTES, "big") + handle)
        if self._read(1, time.monotonic() + limit_s) != WRITTEN:
            raise RuntimeError("the sender could not map this side's memory")

    def _read(self, count: int, end_s: float) -> bytes:
        found, news = b"", select.poll()  # not `select`, which knows no descriptor above 1,023
        news.register(self._peer, select.POLLIN)
        while len(found) < count:
            if not news.poll(1000 * max(0.0, end_s - time.monotonic())):
                raise TimeoutError("the other side did not answer in time")
            piece = self._peer.recv(count - len(found))
            if not piece:
                raise ConnectionError("the other side closed the connection")
            found += piece
        return found
