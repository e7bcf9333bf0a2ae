"""Starting a stock SGLang engine: what is checked first, and what a start that fails or hangs leaves behind."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil
import torch

from services.core.errors import ConfigError, ServiceLostError, WaitTimeoutError
from services.rollout.sglang.order import CONFIG_FILE
from services.rollout.sglang.plugin import PLUGIN_GROUP, PLUGIN_NAME

PROGRESS_S = 15.0


def check_plugin() -> None:
    """SGLang looks for the plug-in among installed distributions; without it a policy load would reach the drafter."""
    if not any(point.name == PLUGIN_NAME for point in entry_points(group=PLUGIN_GROUP)):
        raise ConfigError(
            f"the SGLang plug-in {PLUGIN_NAME!r} is not installed: install this package (`pip install .`) in the "
            "environment of the rollout servers"
        )


def start_engine(arguments: Mapping[str, Any], server: str, start_timeout_s: float) -> Any:
    """Blocks until the engine can serve, saying so now and then. WaitTimeoutError after `start_timeout_s`,
    ServiceLostError when one of SGLang's processes failed; both leave no process of it behind."""
    sglang = _sglang()
    check_plugin()
    need = int(arguments["tp_size"])
    if torch.cuda.device_count() < need:
        raise ConfigError(
            f"{server} sees {torch.cuda.device_count()} GPUs, rollout.engine.tp asks for {need}: raise "
            "placement.gpus_per_slot, or lower tp"
        )
    os.environ["SGLANG_PLUGINS"] = PLUGIN_NAME
    # Host memory for released weights is set aside once: anew each time costs half a second for each GB of them
    os.environ["TMS_RETAIN_CPU_BACKUP"] = "1"
    arguments = _with_files(arguments)
    before = set(psutil.Process().children(recursive=True))
    with _watched(server, start_timeout_s, before) as expired:
        try:
            engine = sglang.Engine(**arguments, custom_sigquit_handler=_child_failed)
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            _end_children(before)
            if expired.is_set():
                raise WaitTimeoutError(
                    f"{server}: SGLang was not ready within {start_timeout_s:.0f} s (it loads weights, compiles "
                    "kernels and captures CUDA graphs): see its log, or raise coordinator.start_timeout_s"
                ) from None
            raise ServiceLostError(server, f"SGLang could not start: {error}") from error
    signal.signal(signal.SIGQUIT, _engine_died)
    return engine


def _with_files(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """An order to switch goes to SGLang in a file, which each of its processes reads; it stays as long as this one."""
    text = arguments.get(CONFIG_FILE)
    if text is None:
        return arguments
    descriptor, path = tempfile.mkstemp(prefix="longtail-switch-", suffix=".json")
    atexit.register(Path(path).unlink, missing_ok=True)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return {**arguments, CONFIG_FILE: path}


def _sglang() -> Any:
    try:
        import sglang
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        raise ConfigError(
            "SGLang is not installed here: `pip install '.[sglang]'` in the environment of the rollout servers, or set "
            "rollout.engine.type: native"
        ) from None
    return sglang


@contextmanager
def _watched(server: str, timeout_s: float, before: set[psutil.Process]) -> Iterator[threading.Event]:
    """Tells about a start under way; at the time-out ends SGLang's processes, which ends the wait for them."""
    ready, expired = threading.Event(), threading.Event()
    started = time.monotonic()

    def watch() -> None:
        waited = 0.0
        while not ready.wait(min(PROGRESS_S, timeout_s - waited)):
            waited = time.monotonic() - started
            _say(f"{server}: SGLang is starting, {waited:.0f} s of at most {timeout_s:.0f} s")
            if waited >= timeout_s:
                expired.set()
                _end_children(before)
                return

    thread = threading.Thread(target=watch, name=f"{server}-start", daemon=True)
    thread.start()
    try:
        yield expired
    finally:
        ready.set()
        thread.join()


def _say(line: str) -> None:
    """Into the process's own log. Not through `logging`: Ray and SGLang both set up loggers as they like."""
    print(line, file=sys.stderr, flush=True)


def _end_children(before: set[psutil.Process]) -> None:
    for process in psutil.Process().children(recursive=True):
        if process not in before and process.is_running():
            process.kill()


def _child_failed(signum: int, frame: Any) -> None:
    """SGLang's processes send SIGQUIT to their parent when they fail; its stock answer would end this process without
    a word to whoever waits for it."""
    raise RuntimeError("one of its processes failed, see the traceback above in this log")


def _engine_died(signum: int, frame: Any) -> None:
    """In service there is nothing to save: the process ends at once, its supervisor sees that and starts another.
    SGLang's remaining processes end with their parent."""
    _say("one of SGLang's processes died: this rollout server ends")
    os._exit(1)
