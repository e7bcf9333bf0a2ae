"""The two ends of a transfer as actors, without model and engine: for tests on CPU and on GPUs."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import ray
import torch

from actors.clients import TRANSFERS, RayWaiter, ask_for_transfer
from services.config.weights import WeightsConfig
from services.weights import rendezvous
from services.weights.receive import Inbox
from services.weights.rendezvous import Invitation, Offer
from services.weights.send import Outbox

CHUNK = 2**26
BACKEND = "LONGTAIL_TEST_BACKEND"
Shapes = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, number format)


def numbers(shape: tuple[int, ...], dtype: str, seed: int, device: torch.device) -> torch.Tensor:
    """Bits that follow from the seed; no NaN patterns are avoided, because bits are what travels."""
    count = torch.Size(shape).numel() * torch.empty((), dtype=getattr(torch, dtype)).element_size()
    generator = torch.Generator(device).manual_seed(seed)
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator, device=device)
    return data.view(getattr(torch, dtype)).view(shape)


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Number format, shape, and a digest of the bytes."""
    data = tensor.reshape(-1).view(torch.uint8)
    if not tensor.is_cuda:
        return str(tensor.dtype), tuple(tensor.shape), hashlib.sha1(data.numpy().tobytes()).hexdigest()
    total, places = 0, torch.arange(1, CHUNK + 1, device=data.device)  # on the card: 15 GB would take long elsewhere
    for n, chunk in enumerate(data.split(CHUNK)):
        total += (n + 1) * int((chunk.to(torch.int64) * places[: len(chunk)]).sum())
    return str(tensor.dtype), tuple(tensor.shape), str(total)


def choose_as_told() -> None:
    """Between processes without a GPU, links are what the environment says: gloo by default."""
    told = os.environ.get(BACKEND)
    if told is not None:
        vars(rendezvous)["choose_backend"] = lambda *_: told


class Sender:
    """Holds one version, as the policy actor does."""

    def __init__(self, config: WeightsConfig, device: str = "cpu") -> None:
        choose_as_told()
        self._device = torch.device(device)
        self._outbox = Outbox(config, self._device)

    def process_id(self) -> int:
        return os.getpid()

    def hold(self, version: int, shapes: Shapes) -> tuple[Offer, dict[str, Any]]:
        """(offer, bits of what was offered)"""
        self._outbox.clear()
        tensors = {
            name: numbers(shape, dtype, 1000 * version + n, self._device)
            for n, (name, (shape, dtype)) in enumerate(shapes.items())
        }
        offer = self._outbox.hold(version, tensors, ray.get_runtime_context().current_actor)
        return offer, {name: bits(t) for name, t in tensors.items()}

    def send(self, version: int, invitation: Invitation) -> None:
        self._outbox.send(version, invitation)

    def copy_of(self, version: int) -> dict[str, torch.Tensor]:
        return self._outbox.copy_of(version)

    def work(self, seconds: float) -> float:
        """Something else that the process does meanwhile, in its main thread and on its device."""
        a, done, end_s = torch.randn(256, 256, device=self._device), 0, time.monotonic() + seconds
        while time.monotonic() < end_s:
            (a @ a).sum().item()
            done += 1
        return done / seconds


class Receiver:
    """`fetch` takes a version; the time does not include looking at its bits."""

    def __init__(self, name: str, config: WeightsConfig, device: str = "cpu") -> None:
        choose_as_told()
        host = ray.util.get_node_ip_address()
        self._device = torch.device(device)
        self._inbox = Inbox(name, host, config, self._device, ask_for_transfer, RayWaiter())

    def process_id(self) -> int:
        return os.getpid()

    def fetch(self, offer: Offer, pause_s: float = 0.0, look: bool = True) -> tuple[float, dict[str, Any]]:
        """(seconds, bits). `pause_s` after each part."""
        incoming, started, found = self._inbox.open(offer), time.monotonic(), {}
        looking_s = 0.0
        try:
            for part in incoming.parts():
                time.sleep(pause_s)
                before = time.monotonic()
                found |= {name: bits(t) for name, t in part} if look else {}
                looking_s += time.monotonic() - before
        finally:
            incoming.close()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic() - started - looking_s, found

    def load(self, tensors: dict[str, torch.Tensor]) -> int:
        """Bytes, once all tensors are on the device: what comes through the object store."""
        moved = [tensor.to(self._device) for tensor in tensors.values()]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return sum(t.numel() * t.element_size() for t in moved)

    def backend(self) -> str | None:
        link = self._inbox._link
        return None if link is None else link.backend


def sender_class() -> Any:
    return ray.remote(concurrency_groups={TRANSFERS: 4})(Sender)
