"""How NVML's GPUs are found, and a machine without a driver. What NVML itself tells is tested on a GPU (tests/gpu)."""

from __future__ import annotations

import pynvml
import pytest

from services.core.errors import MeterError
from services.energy.nvml import find_gpu, open_nvml
from services.energy.service import EnergyService
from tests.services.energy.scripted import ScriptedReader

UUIDS = ("GPU-11aa", "GPU-11bb", "GPU-22cc")
ALIKE = ("H100", "H100", "H100")
UNLIKE = ("H100", "A100", "H100")


@pytest.mark.parametrize(
    ("entry", "names", "order", "found"),
    [
        ("2", ALIKE, None, 2),
        ("0", UNLIKE, "PCI_BUS_ID", 0),
        ("GPU-22cc", UNLIKE, None, 2),
        ("GPU-2", ALIKE, None, 2),  # CUDA takes the beginning of a uuid
    ],
)
def test_an_entry_is_an_index_or_a_uuid(entry: str, names: tuple[str, ...], order: str | None, found: int) -> None:
    assert find_gpu(entry, UUIDS, names, order) == found


@pytest.mark.parametrize(
    ("entry", "names", "remedy"),
    [
        ("1", UNLIKE, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("3", ALIKE, "nvidia-smi -L"),
        ("GPU-11", ALIKE, "nvidia-smi -L"),  # two begin so
        ("GPU-33", ALIKE, "nvidia-smi -L"),
        ("", ALIKE, "nvidia-smi -L"),
        ("MIG-11aa", ALIKE, "whole GPUs"),
    ],
)
def test_an_entry_that_means_no_one_gpu_is_refused_with_the_remedy(
    entry: str, names: tuple[str, ...], remedy: str
) -> None:
    with pytest.raises(MeterError, match=remedy):
        find_gpu(entry, UUIDS, names, None)


def has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_there_is_no_meter_and_no_noise(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    assert open_nvml(["0"]) is None
    service = EnergyService(["0"], open_nvml, lambda: 7.0)
    reading = service.read(None)
    assert reading.absent and reading.error is None and reading.gpus == () and reading.now_s == 7.0
    service.close()
    assert capsys.readouterr() == ("", "") and not caplog.records and not list(recwarn)


def test_a_meter_that_cannot_start_says_why_in_its_answers() -> None:
    def broken(entries: object) -> ScriptedReader:
        raise MeterError("GPU '9' is not one of the 3")

    service = EnergyService(["9"], broken, lambda: 7.0)
    assert service.read(None).error == "GPU '9' is not one of the 3" and not service.read(None).absent


def test_closing_the_service_ends_the_thread_and_the_reader() -> None:
    reader = ScriptedReader(lambda: 1.0, {"GPU-a": lambda t: t})
    service = EnergyService(["0"], lambda entries: reader, lambda: 1.0)
    assert service.read(None).gpus[0].uuid == "GPU-a"
    service.close()
    assert reader.closed
