"""Control: nothing without the token, everything that a run takes with it, and a clear word when it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from services.coordinator.control import ControlRequest
from services.core.errors import ConfigError, WaitTimeoutError
from services.gateway.settings import Settings, is_loopback
from tests.services.gateway.runs import TOKEN, Runs, gateway

ACTIONS = ("pause", "resume", "checkpoint", "stop", "selector")
BODY: dict[str, Any] = {"selector": {"strategy": "off"}}
RIGHT = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def run_id(finished_root: Path) -> str:
    return sorted(p.name for p in finished_root.iterdir())[0]


@pytest.fixture
def runs(run_id: str) -> Runs:
    runs = Runs()
    runs.add(run_id)
    return runs


@pytest.fixture
def client(finished_root: Path, runs: Runs) -> TestClient:
    return TestClient(gateway(finished_root, runs))


def post(client: TestClient, run_id: str, action: str, headers: dict[str, str] | None = RIGHT) -> Any:
    return client.post(f"/api/v1/runs/{run_id}/control/{action}", json=BODY.get(action), headers=headers)


def control_paths(client: TestClient) -> list[str]:
    """From the schema, so that an end point that is added is tested as well."""
    schema = client.get("/api/v1/openapi.json").json()
    return [path for path, methods in schema["paths"].items() if "post" in methods]


WRONG = {
    "none": {},
    "empty": {"Authorization": "Bearer "},
    "wrong": {"Authorization": "Bearer " + TOKEN[:-1] + "8"},
    "prefix": {"Authorization": "Bearer " + TOKEN[:-1]},
    "longer": {"Authorization": "Bearer " + TOKEN + "0"},
    "basic": {"Authorization": "Basic " + TOKEN},
    "bare": {"Authorization": TOKEN},
    "header": {"X-Token": TOKEN},
    "latin": {"Authorization": "Bearer caf\u00e9-0123456789abcdef"},
}


@pytest.mark.parametrize("how", WRONG)
def test_every_control_end_point_refuses_who_has_no_token(
    client: TestClient, runs: Runs, run_id: str, how: str
) -> None:
    paths = control_paths(client)
    assert {p.rsplit("/", 1)[1] for p in paths} == set(ACTIONS)
    headers = {k.encode(): v.encode("latin-1") for k, v in WRONG[how].items()}
    for path in paths:
        for run in (run_id, "no-such-run"):  # the answer does not tell whether there is such a run
            for body in (b"", b"{", b'{"strategy": "off"}'):
                answer = client.post(path.replace("{run_id}", run), content=body, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert TOKEN not in answer.text
    assert client.post(f"{paths[0].replace('{run_id}', run_id)}?token={TOKEN}").status_code == 401
    assert runs.sent == []


@pytest.mark.parametrize("action", ACTIONS)
def test_only_post_controls(client: TestClient, runs: Runs, run_id: str, action: str) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        answer = client.request(method, f"/api/v1/runs/{run_id}/control/{action}", headers=RIGHT)
        assert answer.status_code == 405
    assert runs.sent == []


def test_a_server_without_control_says_so_whatever_the_token(finished_root: Path, run_id: str, runs: Runs) -> None:
    for app in (gateway(finished_root, None), gateway(finished_root, runs, token=None)):
        client = TestClient(app)
        assert client.get("/api/v1/runs").json()["control"] is False
        for action in ACTIONS:
            answer = post(client, run_id, action)
            assert answer.status_code == 403 and "read-only" in answer.json()["detail"]
    assert runs.sent == []


@pytest.mark.parametrize("action", ACTIONS)
def test_with_the_token_requests_reach_the_run(client: TestClient, runs: Runs, run_id: str, action: str) -> None:
    answer = post(client, run_id, action)
    assert answer.status_code == 202, answer.text
    assert (answer.json()["run_id"], answer.json()["action"]) == (run_id, action) and answer.json()["message"]
    assert runs.sent == [(run_id, ControlRequest(action, "off" if action == "selector" else None))]  # type: ignore[arg-type]
    control = runs.controls[run_id]
    happened = {
        "pause": control.state.paused, "resume": not control.state.paused, "checkpoint": control.take_checkpoint(),
        "stop": control.stopping, "selector": control.state.forced == "off",
    }  # fmt: skip
    assert happened[action]


def test_the_choice_goes_back_to_the_selector(client: TestClient, runs: Runs, run_id: str) -> None:
    post(client, run_id, "selector")
    path = f"/api/v1/runs/{run_id}/control/selector"
    assert client.post(path, json={"strategy": None}, headers=RIGHT).status_code == 202
    assert runs.controls[run_id].state.forced is None


@pytest.mark.parametrize(
    "body", [{}, {"strategy": 3}, {"strategy": "x" * 101}, {"strategy": "off", "more": 1}, [], None]
)
def test_a_wrong_body_is_told(client: TestClient, runs: Runs, run_id: str, body: Any) -> None:
    answer = client.post(f"/api/v1/runs/{run_id}/control/selector", json=body, headers=RIGHT)
    assert answer.status_code == 422 and runs.sent == []


def test_what_the_run_refuses_is_a_conflict_with_its_reason(client: TestClient, runs: Runs, run_id: str) -> None:
    path = f"/api/v1/runs/{run_id}/control/selector"
    answer = client.post(path, json={"strategy": "eagle_9_1_10"}, headers=RIGHT)
    assert answer.status_code == 409 and "one of eagle_3_1_4, off" in answer.json()["detail"]
    runs.controls[run_id].end()
    assert post(client, run_id, "pause").status_code == 409


def test_a_run_that_is_not_reached_is_told_apart_from_one_that_is_not_there(
    client: TestClient, runs: Runs, finished_root: Path, run_id: str
) -> None:
    other = next(p.name for p in finished_root.iterdir() if p.name != run_id)
    assert post(client, other, "pause").status_code == 503
    assert post(client, "no-such-run", "pause").status_code == 404
    assert [r for r, _ in runs.sent] == [other]


def test_a_run_that_does_not_answer_in_time(finished_root: Path, run_id: str) -> None:
    class Late(Runs):
        def send(self, run_id: str, request: ControlRequest) -> str:
            raise WaitTimeoutError("the coordinator did not answer within 15 s")

    answer = post(TestClient(gateway(finished_root, Late())), run_id, "pause")
    assert answer.status_code == 504 and "15 s" in answer.json()["detail"]


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "\u00e9" * 20])
def test_a_token_that_is_easily_guessed_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="16 ASCII characters"):
        Settings(token=token)


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "example.org", "")))
