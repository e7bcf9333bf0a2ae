"""Where a trainer's tensors are: on its device, or in host memory while somebody else works on that device.

What is moved are storages. The tensors over them stay the objects they are, so that whoever holds one (AdamW's state by
parameter, FSDP2's flat view of a shard, a tied head) finds the same values in it afterwards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.models.device import free_cache
from services.policy.sharding import like_shards_of, own
from services.weights.parts import bytes_of


class Residence:
    """Of `tensors()` those that are on `device`: what lies in host memory anyway is left there. Host memory is set
    aside once, pinned where the device is a GPU, and kept: setting it aside takes longer than a copy."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._host: dict[int, Tensor] = {}  # by storage, bytes
        self._gone: set[int] = set()  # storages that are in host memory now
        self.away = False

    @torch.no_grad()
    def leave(self) -> int:
        """Copy everything to host memory and give the device's memory back. Returns bytes."""
        assert not self.away
        owned = {storage._cdata for storage in self._owned(self._tensors())}
        self._host = {key: copy for key, copy in self._host.items() if key in owned}  # none of tensors that are gone
        self.send(self._tensors())
        self.away = True
        free_cache(self._device)
        return sum(copy.nbytes for copy in self._host.values())

    @torch.no_grad()
    def send(self, tensors: Iterable[Tensor]) -> None:
        """These alone, those that left before left out: so that a trainer that begins away never has more than a part
        of itself on the device."""
        leaving = [storage for storage in self._owned(tensors) if storage._cdata not in self._gone]
        for storage in leaving:
            self._host[storage._cdata] = copy = self._room_for(storage)
            copy.copy_(bytes_of(storage), non_blocking=True)
        self._settle()
        for storage in leaving:
            storage.resize_(0)
            self._gone.add(storage._cdata)

    @torch.no_grad()
    def come_back(self) -> int:
        """Take the device's memory again, with what it held. Returns bytes. Raises torch.OutOfMemoryError when it is
        not free; what came back then is there, and a further call goes on with the rest."""
        assert self.away
        for storage in self._owned(self._tensors()):
            if storage._cdata in self._gone:
                copy = self._host[storage._cdata]
                storage.resize_(copy.nbytes)
                bytes_of(storage).copy_(copy, non_blocking=True)
                self._gone.remove(storage._cdata)
        self._settle()
        self.away = False
        return sum(copy.nbytes for copy in self._host.values())

    def at_hand(self, tensor: Tensor) -> Tensor:
        """`tensor` as it can be read and written now: while it is away, over its values in host memory."""
        if isinstance(tensor, DTensor):
            return like_shards_of(tensor, self.at_hand(tensor._local_tensor))
        key = tensor.untyped_storage()._cdata
        if key not in self._gone:
            return tensor
        copy = self._host[key].view(tensor.dtype)
        return copy.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _owned(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Each storage once, however many tensors share it."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            local = own(tensor)
            if local.device.type == self._device.type:
                storage = local.untyped_storage()
                found[storage._cdata] = storage
        return list(found.values())

    def _room_for(self, storage: torch.UntypedStorage) -> Tensor:
        kept = self._host.get(storage._cdata)
        if kept is not None and kept.nbytes == storage.nbytes():
            return kept
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def movable(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy where its storage cannot be given up: that of a file read in place."""
    return tensor if tensor.untyped_storage().resizable() else tensor.clone()
