"""Starting an engine: what is checked first, what a start that fails or hangs leaves behind. Processes are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from services.core.errors import ConfigError, ServiceLostError, WaitTimeoutError
from services.rollout.sglang.order import CONFIG_FILE
from services.rollout.sglang.plugin import PLUGIN_GROUP, PLUGIN_NAME
from services.rollout.sglang.start import check_plugin, start_engine

ARGUMENTS = {"tp_size": 0, "model_path": "x"}  # no GPU asked for: what is tested here needs none


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This package as an installed distribution: SGLang and the check look its plug-in up there."""
    folder = tmp_path / "longtail_rl-0.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: longtail-rl\nVersion: 0.0.0\n")
    (folder / "entry_points.txt").write_text(
        f"[{PLUGIN_GROUP}]\n{PLUGIN_NAME} = services.rollout.sglang.plugin:register\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """`sglang.Engine(**arguments)` becomes a call of the given function."""
    before = signal.getsignal(signal.SIGQUIT)
    monkeypatch.setenv("SGLANG_PLUGINS", "")

    def put(engine: Callable[..., Any]) -> None:
        module = ModuleType("sglang")
        module.Engine = engine  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sglang", module)

    yield put
    signal.signal(signal.SIGQUIT, before)


def child(command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def gone(process: subprocess.Popen[bytes]) -> bool:
    return process.wait(timeout=60) is not None


# ------------------------------------------------------------------ checked first


def test_a_missing_plug_in_is_told_with_the_remedy(starts: Callable[[Callable[..., Any]], None]) -> None:
    starts(lambda **arguments: pytest.fail("started without the plug-in"))
    if not _is_installed():
        with pytest.raises(ConfigError, match=r"the SGLang plug-in 'longtail' is not installed: .*pip install \."):
            start_engine(ARGUMENTS, "rollout-0", 5.0)


def _is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.name == PLUGIN_NAME for point in entry_points(group=PLUGIN_GROUP))


def test_the_plug_in_is_found_among_installed_distributions(installed: None) -> None:
    check_plugin()


def test_a_machine_without_sglang_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Without("sglang"), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"SGLang is not installed here: `pip install"):
        start_engine(ARGUMENTS, "rollout-0", 5.0)


class _Without:
    """An import finder that finds one package nowhere, also where it is installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_too_few_gpus_are_told_before_anything_starts(
    installed: None, starts: Callable[[Callable[..., Any]], None]
) -> None:
    starts(lambda **arguments: pytest.fail("started without its GPUs"))
    with pytest.raises(ConfigError, match=r"rollout-0 sees \d+ GPUs, rollout.engine.tp asks for 999: raise placement"):
        start_engine({"tp_size": 999}, "rollout-0", 5.0)


def test_the_projects_metadata_declares_the_plug_in() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][PLUGIN_GROUP] == {PLUGIN_NAME: "services.rollout.sglang.plugin:register"}


# ------------------------------------------------------------------ starts


def test_an_engine_starts_with_its_arguments(installed: None, starts: Callable[[Callable[..., Any]], None]) -> None:
    seen: dict[str, Any] = {}

    def engine(**arguments: Any) -> str:
        seen.update(arguments, plugins=os.environ["SGLANG_PLUGINS"])
        return "the engine"

    starts(engine)
    before = signal.getsignal(signal.SIGQUIT)
    assert start_engine(ARGUMENTS, "rollout-0", 5.0) == "the engine"
    starting = seen.pop("custom_sigquit_handler")
    assert seen == {**ARGUMENTS, "plugins": "longtail"}, "no other plug-in of the environment is run"
    assert signal.getsignal(signal.SIGQUIT) not in (before, starting), "in service a dead process ends the server"


def test_an_order_to_switch_goes_in_a_file_that_every_process_can_read(
    installed: None, starts: Callable[[Callable[..., Any]], None]
) -> None:
    seen: dict[str, Any] = {}
    starts(lambda **arguments: seen.update(arguments))
    text = '{"1": {"candidate_steps": [0, 3]}}'
    start_engine({**ARGUMENTS, CONFIG_FILE: text}, "rollout-0", 5.0)
    file = Path(seen[CONFIG_FILE])
    assert file.read_text() == text, "also behind the start: SGLang reads it when it wants to"
    file.unlink()


def test_a_start_that_fails_leaves_no_process(installed: None, starts: Callable[[Callable[..., Any]], None]) -> None:
    mine, theirs = child("sleep 60"), []

    def engine(**arguments: Any) -> None:
        theirs.append(child("sleep 60"))
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static")

    starts(engine)
    with pytest.raises(ServiceLostError, match="rollout-0 is lost: SGLang could not start: Not enough memory"):
        start_engine(ARGUMENTS, "rollout-0", 60.0)
    assert gone(theirs[0]) and psutil.Process(mine.pid).is_running() and mine.poll() is None
    mine.kill()
    mine.wait()


def test_a_process_that_fails_in_the_start_is_told(
    installed: None, starts: Callable[[Callable[..., Any]], None]
) -> None:
    """SGLang's processes send SIGQUIT to their parent; its own answer is to end the parent without a word."""
    theirs: list[subprocess.Popen[bytes]] = []

    def engine(custom_sigquit_handler: Any, **arguments: Any) -> None:
        signal.signal(signal.SIGQUIT, custom_sigquit_handler)
        theirs.append(child("read word; kill -QUIT $PPID; sleep 60"))
        assert theirs[0].stdin is not None
        theirs[0].stdin.write(b"now\n")
        theirs[0].stdin.close()
        time.sleep(60)
        pytest.fail("nobody heard of it")

    starts(engine)
    with pytest.raises(ServiceLostError, match="one of its processes failed, see the traceback above in this log"):
        start_engine(ARGUMENTS, "rollout-0", 60.0)
    assert gone(theirs[0])


def test_a_start_that_hangs_runs_out_says_so_and_leaves_no_process(
    installed: None, starts: Callable[[Callable[..., Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs: list[subprocess.Popen[bytes]] = []

    def engine(**arguments: Any) -> None:
        theirs.append(child("sleep 600"))  # more than a test may take
        assert theirs[0].stdout is not None
        if not theirs[0].stdout.read(1):  # as SGLang waits for its scheduler's first word
            raise EOFError

    starts(engine)
    started = time.monotonic()
    with pytest.raises(
        WaitTimeoutError,
        match=r"rollout-0: SGLang was not ready within 0 s .*see its log, or raise coordinator\.start_timeout_s",
    ):
        start_engine(ARGUMENTS, "rollout-0", 0.3)
    assert time.monotonic() - started >= 0.3
    assert gone(theirs[0]) and "rollout-0: SGLang is starting, 0 s of at most 0 s" in capsys.readouterr().err
