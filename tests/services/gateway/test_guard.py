"""What no request may do: leave the folder of runs, send too much, wait for ever, come under a foreign name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from services.gateway.guard import HEADERS, Guard
from services.gateway.pages import FOLDER
from services.gateway.settings import Settings
from tests.services.gateway.runs import TOKEN, Runs, gateway

RIGHT = {"Authorization": f"Bearer {TOKEN}"}
SECRET = "this text is outside of the folder of runs"


@pytest.fixture
def client(finished_root: Path) -> TestClient:
    return TestClient(gateway(finished_root, Runs()))


@pytest.fixture
def guarded(tmp_path: Path, finished_root: Path) -> Path:
    """A folder of runs with something beside it, links out of it, and a folder that is no run."""
    root = tmp_path / "runs"
    root.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.yaml").write_text(SECRET)
    (outside / "report.html").write_text(SECRET)
    (tmp_path / "config.yaml").write_text(SECRET)
    (tmp_path / "report.html").write_text(SECRET)
    (root / "linked").symlink_to(outside)
    (root / "no-run").mkdir()
    (root / ".hidden").mkdir()
    (root / ".hidden" / "config.yaml").write_text(SECRET)
    (root / "file").write_text(SECRET)
    return root


IDS = [
    "..", "../outside", "..%2foutside", "%2e%2e", "%2e%2e%2foutside", "..%5coutside", "....//outside", "linked",
    "no-run", ".hidden", "file", "a/../../outside", "%00", "a%00b", "/etc", "%2fetc%2fpasswd", "~",
    "linked/../../outside",    "x" * 151, "-rf", "caf%C3%A9", "%ff", "a b", "%0d%0aset-cookie:x", "nul", "*", "?", "#",
]  # fmt: skip


@pytest.mark.parametrize("run_id", IDS)
def test_a_run_id_never_leads_out_of_the_folder(guarded: Path, run_id: str) -> None:
    client = TestClient(gateway(guarded, Runs()))
    for path in (f"/api/v1/runs/{run_id}", f"/api/v1/runs/{run_id}/steps", f"/runs/{run_id}/report"):
        answer = client.get(path, follow_redirects=False)
        assert answer.status_code in (404, 422) or answer.url.path in ("/api/v1/runs/", "/api/v1/runs"), answer.text
        assert SECRET not in answer.text and "set-cookie" not in answer.headers
    posted = client.post(f"/api/v1/runs/{run_id}/control/pause", headers=RIGHT, follow_redirects=False)
    assert posted.status_code in (404, 405, 422)


def test_none_of_them_is_listed(guarded: Path) -> None:
    assert TestClient(gateway(guarded)).get("/api/v1/runs").json()["runs"] == []


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "page.html", "x", "page.css/", ""])
def test_only_assets_are_served_as_assets(client: TestClient, name: str) -> None:
    answer = client.get(f"/assets/{name}")
    assert answer.status_code == 404 and "import" not in answer.text


@pytest.mark.parametrize("size", [4097, 10**6])
def test_an_oversized_body_is_refused(client: TestClient, finished_root: Path, size: int) -> None:
    path = f"/api/v1/runs/{next(finished_root.iterdir()).name}/control/selector"
    answer = client.post(path, content=b" " * size, headers=RIGHT)
    assert answer.status_code == 413 and "4096" in answer.json()["detail"]
    assert client.post("/", content=b" " * size).status_code == 413
    assert client.post(path, content=b" " * 4096, headers=RIGHT).status_code == 422


async def call(
    app: Any, messages: AsyncIterator[dict[str, Any]], headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return await anext(messages)

    fields = {"host": "testserver", **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/x",
        "raw_path": b"/x", "query_string": b"", "root_path": "", "scheme": "http", "server": ("testserver", 80),
        "client": ("127.0.0.1", 1), "headers": [(k.encode(), v.encode()) for k, v in fields.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_body_that_lies_about_its_length_is_cut_off_while_it_arrives(finished_root: Path) -> None:
    taken = 0

    async def endless() -> AsyncIterator[dict[str, Any]]:
        nonlocal taken
        while True:
            taken += 1000
            yield {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    for headers in ({}, {"content-length": "5"}, {"content-length": "-5"}, {"content-length": "NaN"}):
        taken = 0
        status, _ = asyncio.run(call(gateway(finished_root), endless(), headers))
        assert status == 413 and taken <= 6000


def test_a_body_that_never_ends_is_given_up(finished_root: Path) -> None:
    async def slow() -> AsyncIterator[dict[str, Any]]:
        while True:
            yield {"type": "http.request", "body": b"x", "more_body": True}
            await asyncio.sleep(0.05)

    status, body = asyncio.run(asyncio.wait_for(call(gateway(finished_root, request_s=0.3), slow()), 20))
    assert status == 408 and "0.3 s" in body["detail"]


def test_an_application_that_hangs_is_given_up() -> None:
    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def empty() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.request", "body": b"", "more_body": False}

    app = Guard(hangs, Settings(hosts=("testserver",), request_s=0.2))
    assert asyncio.run(asyncio.wait_for(call(app, empty()), 20))[0] == 408


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("[::1]", 200),
        ("evil.example", 421), ("localhost.evil.example", 421), ("evil.example:8000", 421), ("", 421), ("[::2]", 421),
        ("localhost:8000@evil.example", 421), ("127.0.0.1.evil.example:80", 421), ("::1", 421),
    ],
)  # fmt: skip
def test_foreign_host_names_are_refused(finished_root: Path, host: str, status: int) -> None:
    """A name that an attacker lets resolve to this machine makes their page same-origin with this server."""
    client = TestClient(gateway(finished_root, hosts=Settings().hosts))
    assert client.get("/api/v1/runs", headers={"Host": host}).status_code == status


def test_a_further_host_name_may_be_allowed(finished_root: Path) -> None:
    client = TestClient(gateway(finished_root, hosts=("runs.example",)))
    assert client.get("/", headers={"Host": "runs.example:8443"}).status_code == 200
    assert client.get("/", headers={"Host": "other.example"}).status_code == 421


def test_a_target_that_is_too_long_is_refused(client: TestClient) -> None:
    assert client.get("/api/v1/runs?x=" + "a" * 3000).status_code == 414


@pytest.mark.parametrize("path", ["/", "/api/v1/runs", "/assets/page.js", "/nowhere", "/api/v1/runs/none"])
def test_every_answer_carries_the_security_headers(client: TestClient, path: str) -> None:
    answer = client.get(path)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "unsafe" not in answer.headers["content-security-policy"] and "server" not in answer.headers


def test_refusals_carry_them_too(client: TestClient) -> None:
    answer = client.get("/", headers={"Host": "evil.example"})
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_other_sites_are_not_let_in(client: TestClient) -> None:
    answer = client.get("/api/v1/runs", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert client.options("/api/v1/runs/a/control/stop", headers=preflight).status_code == 405


def test_a_report_may_style_itself_and_run_nothing(client: TestClient, finished_root: Path) -> None:
    answer = client.get(f"/runs/{next(finished_root.iterdir()).name}/report")
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "default-src 'none'" in policy and "script-src" not in policy


def test_websockets_are_closed(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/"):
        pass


def test_the_page_names_nothing_from_elsewhere(client: TestClient) -> None:
    for name in ("", *(f"assets/{file.name}" for file in FOLDER.iterdir() if file.suffix != ".html")):
        answer = client.get(f"/{name}")
        assert answer.status_code == 200
        found = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", answer.text))
        assert found <= {"http://www.w3.org"}, f"{name}: {found}"
