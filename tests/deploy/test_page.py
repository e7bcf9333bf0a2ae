"""`longtail page` as a person and as a thousand readers meet it: a real process, real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import stat
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.control import ProcessChannel, _answer, _environment, newest_coordinator
from deploy.page import HEADER_S, settings_for
from deploy.token import Token, control_token
from services.coordinator.control import ControlRequest
from services.core.errors import ConfigError, ControlRefusedError, ServiceLostError, WaitTimeoutError
from tests.deploy.page_process import TOKEN, Served, served
from tests.services.gateway.runs import make_run

READERS = 1000
SLOW = 100


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page") / "runs"
    make_run(root, "first")
    return root


@pytest.fixture
def many_files() -> None:
    """A thousand connections are a thousand files on this side too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * READERS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * READERS), hard))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


async def get(port: int, path: str, times: int, start: asyncio.Event) -> list[tuple[float, int, bytes]]:
    """Ask again and again over one connection: (seconds, status, body) each time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    out = []
    await start.wait()
    for _ in range(times):
        began = time.monotonic()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        status, body = await read_answer(reader)
        out.append((time.monotonic() - began, status, body))
    writer.close()
    return out


async def held_open(port: int, first: bytes) -> float:
    """Seconds until the server closes a connection on which only `first` was sent, a byte a second after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    writer.write(first)
    while True:
        try:
            if not await asyncio.wait_for(reader.read(1000), 1.0):
                return time.monotonic() - began
        except TimeoutError:
            writer.write(b"x")
        except ConnectionResetError:
            return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_readers_and_slow_clients_beside_them(root: Path, many_files: None) -> None:
    async def crowd(server: Served) -> tuple[list[tuple[float, int, bytes]], list[float]]:
        halves = (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        slow = [asyncio.create_task(held_open(server.port, halves[i % 2])) for i in range(SLOW)]
        start = asyncio.Event()
        run = next(root.iterdir()).name
        paths = (f"/api/v1/runs/{run}", f"/api/v1/runs/{run}/spans", f"/api/v1/runs/{run}/steps", "/api/v1/runs")
        readers = [asyncio.create_task(get(server.port, paths[i % 4], 3, start)) for i in range(READERS)]
        await asyncio.sleep(0)
        start.set()
        answers = [a for part in await asyncio.wait_for(asyncio.gather(*readers), 300) for a in part]
        return answers, await asyncio.wait_for(asyncio.gather(*slow), 200)

    with served(root) as server:
        answers, held = asyncio.run(crowd(server))
        assert len(answers) == 3 * READERS and {status for _, status, _ in answers} == {200}
        assert len({body for _, _, body in answers}) == 4, "readers of one thing got different answers"
        assert all(seconds > HEADER_S * 0.8 for seconds in held), sorted(held)
        times = sorted(seconds for seconds, _, _ in answers)
        print(f"seconds to an answer: median {times[len(times) // 2]:.3f}, longest {times[-1]:.3f}")
        assert server.process.poll() is None
        assert json.load(urllib.request.urlopen(f"{server.url}/api/v1/runs", timeout=120))["control"] is True


def test_a_connection_may_be_used_again_after_a_pause(root: Path) -> None:
    """The limit is on a header that does not come to its end, not on a reader who polls."""

    async def poll(port: int) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        statuses = []
        for _ in range(4):
            writer.write(b"GET /api/v1/runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            statuses.append((await read_answer(reader))[0])
            await asyncio.sleep(HEADER_S * 0.4)
        writer.close()
        return statuses

    with served(root, "--read-only") as server:
        assert asyncio.run(poll(server.port)) == [200] * 4


# ------------------------------------------------------------------ what a person meets


def page(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["page", *arguments])
    assert done.exit_code == 2, done.output
    return done.output


def test_mistakes_are_told_with_the_remedy(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LONGTAIL_TOKEN", raising=False)
    assert "is no folder: name the one that holds run folders" in page(str(tmp_path / "none"))
    assert "choose another --host or --port" in page(str(root), "--host", "203.0.113.7", "--read-only")
    assert "set LONGTAIL_TOKEN to a token of your own" in page(str(root), "--host", "0.0.0.0")
    monkeypatch.setenv("LONGTAIL_TOKEN", "short")
    assert "at least 16 ASCII characters" in page(str(root))
    with served(root) as server:
        assert f"cannot listen on 127.0.0.1:{server.port}" in page(str(root), "--port", str(server.port), "--read-only")


def test_who_listens_to_all_answers_to_names_that_were_allowed() -> None:
    chosen = Token(TOKEN, "x", chosen=True)
    assert settings_for("127.0.0.1", None, ("Proxy.Example",)).hosts[-1] == "proxy.example"
    assert settings_for("192.0.2.1", chosen, ()).hosts[-1] == "192.0.2.1"
    assert settings_for("0.0.0.0", None, ()).token is None
    with pytest.raises(ConfigError, match="--read-only"):
        settings_for("::", Token(TOKEN, "a file", chosen=False), ())


def test_the_token_is_made_once_and_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LONGTAIL_TOKEN", raising=False)
    before = os.umask(0)
    try:
        first = control_token()
    finally:
        os.umask(before)
    path = Path(first.source)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(first.value) >= 40 and not first.chosen
    assert control_token() == first and [p.name for p in path.parent.iterdir()] == ["token"]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        control_token()
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        control_token()
    monkeypatch.setenv("LONGTAIL_TOKEN", TOKEN)
    assert control_token().chosen and control_token().value == TOKEN


def test_the_newest_coordinator_is_asked() -> None:
    names = [
        "longtail-a-1-coordinator", "longtail-a-1-coordinator-2", "longtail-a-1-coordinator-10",
        "longtail-a-coordinator", "longtail-a-1-coordinator-x", "longtail-a-1-policy", "longtail-aa-1-coordinator-99",
    ]  # fmt: skip
    assert newest_coordinator(names, "a-1") == "longtail-a-1-coordinator-10"
    assert newest_coordinator(names, "a") == "longtail-a-coordinator"
    assert newest_coordinator(names, "b") is None and newest_coordinator([], "a") is None
    assert newest_coordinator(names, "a.1") is None


def folder_of(root: Path, start: dict[str, Any]) -> ProcessChannel:
    (root / "a").mkdir()
    (root / "a" / "run.json").write_text(json.dumps({"starts": [{"ray": {"address": "old:1"}}, start]}))
    return ProcessChannel(root)


def test_a_run_without_ray_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(ServiceLostError, match="its folder names no Ray"):
        folder_of(tmp_path, {"at": "today"}).send("a", ControlRequest("pause"))
    with pytest.raises(ServiceLostError, match="its folder names no Ray"):
        ProcessChannel(tmp_path).send("none", ControlRequest("pause"))


def test_a_ray_that_is_gone_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process is started that would look for it."""
    monkeypatch.setattr("deploy.control.PROCESS_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    channel = folder_of(tmp_path, {"ray": {"address": f"127.0.0.1:{port}", "auth_mode": "disabled"}})
    with pytest.raises(ServiceLostError, match=rf"Ray at 127\.0\.0\.1:{port} is lost: .*refused: the run has ended"):
        channel.send("a", ControlRequest("pause"))


def test_one_that_is_no_ray_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.control.PROCESS_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        channel = folder_of(tmp_path, {"ray": {"address": address, "auth_mode": "disabled"}})
        with pytest.raises(WaitTimeoutError, match=f"no connection to Ray at {address} within 3 s"):
            channel.send("a", ControlRequest("pause"))


def test_how_a_ray_is_reached_comes_from_the_run_unless_a_person_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert _environment("token")["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_MODE" not in _environment(None)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert _environment("token")["RAY_AUTH_MODE"] == "disabled"


def test_answers_of_the_asking_process_keep_their_kind() -> None:
    def done(stdout: str, code: int = 0, stderr: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, stdout, stderr)

    assert _answer(done('a line of Ray\n{"message": "yes"}\n'), "x:1") == "yes"
    with pytest.raises(ControlRefusedError, match="no such"):
        _answer(done('{"error": "ControlRefusedError", "message": "no such"}'), "x:1")
    with pytest.raises(ServiceLostError, match="RAY_AUTH_TOKEN"):
        _answer(done("", 1, "InvalidAuthToken\nConnectionError: no"), "x:1")
    with pytest.raises(ServiceLostError, match="it said nothing"):
        _answer(done("", -9), "x:1")
