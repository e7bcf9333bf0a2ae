"""What one machine has, looked at from a process on it. Pickled by value, so that machines without Longtail answer too:
this module imports the standard library and psutil only, and NVML where there is one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("ray", "torch", "sglang", "transformers")


@dataclass(frozen=True, slots=True)
class Question:
    """What to look for. `model`: a folder, None for the model that ships with Longtail; `folders`: to be written to;
    `ports`: to be listened on."""

    model: str | None = None
    folders: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """`total_bytes` of its memory; None where the driver does not tell, as in some virtual machines."""

    name: str
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class Folder:
    """`free_bytes` where the folder is, or would be made; `problem` when it cannot be written."""

    path: str
    free_bytes: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """`versions`: of python and packages, those that are installed; longtail's is "present" for a plain checkout.
    `cuda`: what torch was built for; `driver_cuda`: the newest that the NVIDIA driver runs; None without one.
    `model_bytes`: of its safetensors files; None when the folder has no config.json. `model_files`: names and sizes."""

    host: str
    versions: dict[str, str]
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    cuda: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    model_bytes: int | None = None
    model_files: tuple[tuple[str, int], ...] = ()
    folders: tuple[Folder, ...] = ()
    ports_taken: tuple[int, ...] = field(default=())


def look(question: Question) -> Seen:
    """On the machine that runs this."""
    driver, driver_cuda, gpus = _nvidia()
    model_bytes, model_files = (None, ()) if question.model is None else _model(Path(question.model))
    return Seen(
        host=socket.gethostname(),
        versions=_versions(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        cuda=_torch_cuda(),
        driver=driver,
        driver_cuda=driver_cuda,
        model_bytes=model_bytes,
        model_files=model_files,
        folders=tuple(_folder(Path(f)) for f in question.folders),
        ports_taken=_taken(question.ports),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("services") is not None and importlib.util.find_spec("actors") is not None:
        found["longtail"] = "present"
    return found


def _torch_cuda() -> str | None:
    """Read from torch's own file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def _nvidia() -> tuple[str | None, str | None, tuple[Gpu, ...]]:
    """(driver version, its CUDA version, GPUs); nothing where there is no driver. What a driver does not tell is
    unknown: that is no reason for a run not to start."""
    if importlib.util.find_spec("pynvml") is None:
        return None, None, ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, None, ()

    def told(ask: Callable[..., Any], *of: Any) -> Any:
        try:
            return ask(*of)
        except pynvml.NVMLError:
            return None

    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        memory = [told(pynvml.nvmlDeviceGetMemoryInfo, h) for h in handles]
        names = [_text(told(pynvml.nvmlDeviceGetName, h) or "GPU") for h in handles]
        gpus = [Gpu(name, m.total if m is not None else None) for name, m in zip(names, memory, strict=True)]
        cuda = told(pynvml.nvmlSystemGetCudaDriverVersion)
        version = _text(told(pynvml.nvmlSystemGetDriverVersion) or "unknown")
        return version, None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}", tuple(gpus)
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _model(folder: Path) -> tuple[int | None, tuple[tuple[str, int], ...]]:
    if not (folder / "config.json").is_file():
        return None, ()
    files = tuple(sorted((f.name, f.stat().st_size) for f in folder.iterdir() if f.is_file()))
    return sum(size for name, size in files if name.endswith(".safetensors")), files


def _folder(path: Path) -> Folder:
    there = path.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if not there.is_dir():
        return Folder(str(path), free, f"{there} is no folder")
    if not os.access(there, os.W_OK):
        return Folder(str(path), free, f"{there} is not writable")
    return Folder(str(path), free)


def _taken(ports: Sequence[int]) -> tuple[int, ...]:
    return tuple(port for port in ports if not _free(port))


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
