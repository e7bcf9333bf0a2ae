"""The receiver: asks the sender of a version for it and takes it part by part, onto its own device."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import torch

from services.config.schema import ClusterConfig
from services.config.weights import WeightsConfig
from services.core.errors import LongtailError, ServiceLostError, TransferError
from services.core.protocols import Pending, Waiter
from services.models.device import pick_device
from services.weights.link import DeviceFacts, Link
from services.weights.parts import Manifest, NamedTensors, sealed_bytes, unpack
from services.weights.rendezvous import Doorway, Invitation, Offer, part_mark

T = TypeVar("T")
Ask = Callable[[Offer, Invitation], Pending[None]]
# The sender's word on why it gave up comes a moment after it closed the connection.
LAST_WORD_S = 2.0


class Inbox:
    """`name` is the receiver's; `host` the address at which other machines reach it. `ask` calls the sender's `send`;
    `waiter` says whether that call has ended. One transfer at a time."""

    def __init__(
        self, name: str, host: str, config: WeightsConfig, device: torch.device, ask: Ask, waiter: Waiter
    ) -> None:
        self._name, self._host, self._config, self._device = name, host, config, device
        self._ask, self._waiter = ask, waiter
        self._link: Link | None = None
        self._link_id = self._sender_id = ""
        self._under_way = False

    def open(self, offer: Offer) -> IncomingVersion:
        """Nothing is asked for until its parts are."""
        return IncomingVersion(self, offer)

    def receive(self, offer: Offer) -> Iterator[NamedTensors]:
        """Each part as it comes. Raises TransferError when one does not come."""
        self.settle()
        self._under_way = True
        call, link, transfer_id = self._begin(offer)
        for index in range(len(offer.manifest.parts)):  # and no name for a part: it would live until the next has come
            yield self._take(offer.manifest, index, call, link, transfer_id)

    def _take(self, manifest: Manifest, index: int, call: _Call, link: Link, transfer_id: str) -> NamedTensors:
        limit_s, part = self._config.part_timeout_s, manifest.parts[index]
        buffer = call.explained(partial(link.receive, sealed_bytes(part), limit_s, call.look))
        tensors = unpack(part, buffer, part_mark(transfer_id, index))
        if index == len(manifest.parts) - 1:
            call.finish(limit_s)
            self._under_way = False
        return tensors

    def settle(self) -> None:
        """End a transfer that did not come to its end, and its link: what is still on its way there would be taken for
        something else."""
        if self._under_way:
            self.close()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link, self._link_id, self._under_way = None, "", False

    def _begin(self, offer: Offer) -> tuple[_Call, Link, str]:
        """(the sender's call under way, the link, the transfer's id)"""
        if self._link is not None and (self._sender_id != offer.sender_id or not self._link.alive):
            self.close()
        transfer_id = uuid.uuid4().hex
        facts = DeviceFacts.of(self._device)
        if self._link is not None:
            known = Invitation(self._name, self._link_id, transfer_id, self._host, 0, 0, facts)
            return _Call(self._ask(offer, known), self._waiter), self._link, transfer_id
        doorway = Doorway(self._host, self._config.connect_timeout_s)
        try:
            invitation = Invitation(self._name, doorway.link_id, transfer_id, self._host, *doorway.ports, facts)
            call = _Call(self._ask(offer, invitation), self._waiter)
            link = call.explained(lambda: doorway.admit(self._device, self._config.connect_timeout_s, call.look))
        finally:
            doorway.close()
        print(f"{self._name}: policies come over {link.backend} to {self._host}", file=sys.stderr, flush=True)
        self._link, self._link_id, self._sender_id = link, doorway.link_id, offer.sender_id
        return call, link, transfer_id


class IncomingVersion:
    """An offered version, as `parts.Incoming`."""

    def __init__(self, inbox: Inbox, offer: Offer) -> None:
        self._inbox, self._offer = inbox, offer

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._offer.manifest.shapes

    @property
    def num_parts(self) -> int:
        return len(self._offer.manifest.parts)

    def parts(self) -> Iterator[NamedTensors]:
        return self._inbox.receive(self._offer)

    def close(self) -> None:
        self._inbox.settle()


def build_inbox(config: ClusterConfig, name: str, host: str, ask: Ask, waiter: Waiter) -> Inbox:
    """Onto the device that the server's engine has its weights on: of several GPUs the first."""
    return Inbox(name, host, config.weights, pick_device(config.model.device), ask, waiter)


class _Call:
    """The sender's `send` under way: what it raises is why nothing comes any more."""

    def __init__(self, pending: Pending[None], waiter: Waiter) -> None:
        self.pending, self._waiter = pending, waiter

    def look(self) -> None:
        """Raises TransferError when the call has failed. That it has succeeded says nothing: what was sent may still be
        on its way."""
        if self._waiter.wait([self.pending], 0.0):
            self.finish(LAST_WORD_S)

    def finish(self, limit_s: float) -> None:
        try:
            self.pending.result(limit_s)
        except ServiceLostError as error:
            raise TransferError(f"the sender is lost: {error.reason}") from None
        except TransferError:
            raise
        except LongtailError as error:
            raise TransferError(f"{self.pending.what}: {error}") from None

    def explained(self, action: Callable[[], T]) -> T:
        """`action`, with the sender's own words when it failed there too."""
        try:
            return action()
        except TransferError:
            if self._waiter.wait([self.pending], LAST_WORD_S):
                self.finish(LAST_WORD_S)
            raise
