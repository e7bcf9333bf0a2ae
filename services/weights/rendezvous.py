"""How the two sides of a link find each other. The receiver binds (ports are given by the system) and says where; the
sender comes. Plain records, so that they can be part of a control message."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from services.core.errors import TransferError
from services.weights.link import LATER_S, DeviceFacts, Link, Look, bounded, choose_backend, first_line, open_link
from services.weights.parts import Manifest

GREETING_BYTES = 4096
GREETING_S = 3.0  # a stranger who says nothing keeps the sender waiting no longer


@dataclass(frozen=True)
class Offer:
    """A published version that its sender hands out on demand. `sender` is whatever the receiver needs to ask it;
    `sender_id` tells its processes apart."""

    version: int
    sender: Any
    sender_id: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Invitation:
    """A receiver asks for a version. `link_id` names the link that both have from an earlier version (ports are 0), or
    a new one: then the sender comes to `host`, where the receiver listens on `peer_port` and keeps the group's store on
    `store_port`."""

    receiver: str
    link_id: str
    transfer_id: str
    host: str
    store_port: int
    peer_port: int
    device: DeviceFacts


def part_mark(transfer_id: str, index: int) -> int:
    """A number below 2**62 that no other part of any transfer has."""
    digest = hashlib.blake2b(f"{transfer_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class Doorway:
    """The receiver's side of a link that is to be: a socket that listens, and the store."""

    def __init__(self, host: str, limit_s: float) -> None:
        self.link_id = uuid.uuid4().hex
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
            self._store = TCPStore(host, 0, None, True, timedelta(seconds=limit_s), wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            raise TransferError(f"cannot listen on {host}: {first_line(error)}") from None
        self._listener.settimeout(limit_s + LATER_S)

    @property
    def ports(self) -> tuple[int, int]:
        """(store, peer)"""
        return self._store.port, self._listener.getsockname()[1]

    def admit(self, device: torch.device, limit_s: float, look: Look) -> Link:
        """The link to the sender that comes with the right id; others are sent away."""
        peer, facts = bounded(self._accept, limit_s, look, "waiting for the sender to connect")
        backend = choose_backend(DeviceFacts.of(device), facts)
        return open_link(backend, self._store, 1, self.host, device, peer, limit_s, look)

    def _accept(self) -> tuple[socket.socket, DeviceFacts]:
        while True:
            peer, _ = self._listener.accept()
            peer.settimeout(GREETING_S)
            greeting = _greeting(peer)
            if greeting.get("link_id") == self.link_id:
                peer.sendall(b"\n")
                return peer, DeviceFacts(greeting["gpu"], greeting["nccl"])
            peer.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # nobody is connected to a listening socket; this ends a wait in `accept`
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _greeting(peer: socket.socket) -> dict[str, Any]:
    """One line of JSON; nothing from somebody who says something else."""
    try:
        with peer.makefile("rb") as stream:
            found = json.loads(stream.readline(GREETING_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def come(invitation: Invitation, device: torch.device, limit_s: float, look: Look) -> Link:
    """The sender's side: connect to a receiver's doorway."""

    def dial() -> tuple[socket.socket, TCPStore]:
        peer = socket.create_connection((invitation.host, invitation.peer_port), timeout=limit_s)
        facts = {"link_id": invitation.link_id, **asdict(DeviceFacts.of(device))}
        peer.sendall(json.dumps(facts).encode() + b"\n")
        if peer.recv(1) != b"\n":
            raise OSError("it has another link in mind")
        store = TCPStore(invitation.host, invitation.store_port, None, False, timedelta(seconds=limit_s))
        return peer, store

    what = f"connecting to {invitation.receiver} at {invitation.host}"
    peer, store = bounded(dial, limit_s, look, what)
    own = peer.getsockname()[0]  # the address that leads to the receiver
    backend = choose_backend(DeviceFacts.of(device), invitation.device)
    return open_link(backend, store, 0, own, device, peer, limit_s, look)
