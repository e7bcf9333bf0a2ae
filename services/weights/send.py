"""The sender: keeps the published version on its device and hands it out to whoever asks, in any thread, also while the
policy is trained. Never waits for a receiver longer than its limits."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.config.weights import WeightsConfig
from services.core.errors import TransferError
from services.weights.link import Link
from services.weights.parts import Manifest, pack, plan
from services.weights.rendezvous import Invitation, Offer, come, part_mark


@dataclass(frozen=True)
class _Held:
    """A version; its tensors are never written to."""

    version: int
    tensors: Mapping[str, Tensor]
    manifest: Manifest


class Outbox:
    """One version at a time. `send` and `copy_of` may run in several threads at once, one for each receiver."""

    def __init__(self, config: WeightsConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._id = uuid.uuid4().hex
        self._held: _Held | None = None
        self._links: dict[str, tuple[str, Link]] = {}  # (link id, link) by receiver
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Let go of the version, so that the next one has room; transfers of it end with their part."""
        self._held = None

    def hold(self, version: int, tensors: Mapping[str, Tensor], sender: Any) -> Offer:
        """`tensors` are on this outbox's device and belong to it from now on."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other threads, with streams of their own, read them from now on
        held = _Held(version, tensors, plan(tensors, self._config.part_bytes))
        self._held = held
        return Offer(version, sender, self._id, held.manifest)

    def send(self, version: int, invitation: Invitation) -> None:
        """Hand `version` to a receiver. Raises TransferError when it is not held any more or the receiver is lost."""
        held = self._current(version)
        link = self._link(invitation)
        try:
            for index, part in enumerate(held.manifest.parts):
                self._current(version)
                with link.stream():
                    buffer = pack(part, held.tensors, self._device, part_mark(invitation.transfer_id, index))
                    link.send(buffer, self._config.part_timeout_s, lambda: None)
        except TransferError as error:
            self._drop(invitation.receiver, link)
            raise TransferError(f"{invitation.receiver}: {error}") from None

    def copy_of(self, version: int) -> dict[str, Tensor]:
        """On the CPU, for a receiver that no link leads to."""
        return {name: tensor.to("cpu") for name, tensor in self._current(version).tensors.items()}

    def _current(self, version: int) -> _Held:
        held = self._held
        if held is None or held.version != version:
            now = "the next one is being published" if held is None else f"version {held.version} is published"
            raise TransferError(f"policy version {version} is superseded: {now}")
        return held

    def _link(self, invitation: Invitation) -> Link:
        with self._lock:
            link_id, link = self._links.get(invitation.receiver, ("", None))
        if link is not None and link_id == invitation.link_id:
            return link
        if link is not None:  # of an earlier process, or of a transfer that failed on the other side
            self._drop(invitation.receiver, link)
        if not invitation.peer_port:
            raise TransferError(f"{invitation.receiver} knows a link that is gone here")
        link = come(invitation, self._device, self._config.connect_timeout_s, lambda: None)
        with self._lock:
            self._links[invitation.receiver] = invitation.link_id, link
        return link

    def _drop(self, receiver: str, link: Link) -> None:
        with self._lock:
            if self._links.get(receiver, ("", None))[1] is link:
                del self._links[receiver]
        link.close()
