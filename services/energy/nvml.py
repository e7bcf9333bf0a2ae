"""The GPUs of a machine through NVML (package nvidia-ml-py), by what CUDA_VISIBLE_DEVICES calls them.

Source: NVML API reference. nvmlDeviceGetTotalEnergyConsumption: millijoules since the driver was loaded, Volta and
newer; nvmlDeviceGetPowerUsage: milliwatts. NVML numbers GPUs by PCI bus.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from services.core.energy import EnergyMethod
from services.core.errors import MeterError

NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


def find_gpu(entry: str, uuids: Sequence[str], names: Sequence[str], order: str | None) -> int:
    """The NVML index of one entry of CUDA_VISIBLE_DEVICES: an index, a uuid, or the beginning of one.

    CUDA numbers unlike GPUs by speed unless CUDA_DEVICE_ORDER (`order`) says PCI_BUS_ID: an index then means nothing to
    NVML. Raises MeterError for it, for MIG slices, which have no energy counter, and for what is not there.
    """
    if entry.isdecimal():
        if order != "PCI_BUS_ID" and len(set(names)) > 1:
            raise MeterError(f"GPU {entry} is ambiguous among unlike GPUs: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
        if int(entry) < len(uuids):
            return int(entry)
    elif entry.startswith("MIG-"):
        raise MeterError(f"{entry}: a MIG slice has no energy counter; use whole GPUs to measure energy")
    found = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    if len(found) != 1:
        raise MeterError(
            f"GPU {entry!r} is not one of the {len(uuids)} that NVML shows here: see nvidia-smi -L, and "
            "CUDA_VISIBLE_DEVICES of the Ray node"
        )
    return found[0]


class NvmlReader:
    """Opened by `open_nvml`; `handles` by uuid."""

    def __init__(self, entries: Mapping[str, str], handles: Mapping[str, Any]) -> None:
        self.entries = entries
        self._handles = handles
        self.methods: dict[str, EnergyMethod] = {uuid: _method(uuid, handle) for uuid, handle in handles.items()}

    def read(self, uuid: str) -> float:
        handle = self._handles[uuid]
        counts = self.methods[uuid] == "counter"
        ask = pynvml.nvmlDeviceGetTotalEnergyConsumption if counts else pynvml.nvmlDeviceGetPowerUsage
        try:
            return float(ask(handle)) / 1000.0
        except pynvml.NVMLError as error:
            raise MeterError(f"{uuid}: NVML says {error}; see nvidia-smi") from None

    def close(self) -> None:
        pynvml.nvmlShutdown()


def open_nvml(entries: Sequence[str]) -> NvmlReader | None:
    """See OpenReader."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in NO_DRIVER:
            return None
        raise MeterError(f"NVML does not start: {error}; see nvidia-smi") from None
    try:
        return _reader(entries)
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        raise MeterError(f"NVML does not list the GPUs: {error}; see nvidia-smi") from None
    except MeterError:
        pynvml.nvmlShutdown()
        raise


def _reader(entries: Sequence[str]) -> NvmlReader:
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(h) for h in handles]
    names = [pynvml.nvmlDeviceGetName(h) for h in handles]
    order = os.environ.get("CUDA_DEVICE_ORDER")
    places = {entry: find_gpu(entry, uuids, names, order) for entry in entries}
    return NvmlReader({entry: uuids[i] for entry, i in places.items()}, {uuids[i]: handles[i] for i in places.values()})


def _method(uuid: str, handle: Any) -> EnergyMethod:
    """ "counter" where the card has one. Raises MeterError for a card that tells neither energy nor power."""
    try:
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError_NotSupported:
        try:
            pynvml.nvmlDeviceGetPowerUsage(handle)
        except pynvml.NVMLError as error:
            raise MeterError(f"{uuid} tells neither energy nor power: {error}; nothing to do on this card") from None
        return "power"
    return "counter"
