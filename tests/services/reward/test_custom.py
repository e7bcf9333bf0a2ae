"""Verifiers that others bring: functions, and real HTTP servers that behave badly."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.core.errors import ConfigError
from services.core.types import FinishReason, Reward
from services.reward.custom import by_function, by_http, load_function


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_package.score", "No module named"),
        ("json.no_such_name", "no attribute"),
        ("json.decoder.NaN", "is float, not a function"),
    ],
)
def test_a_function_that_is_not_there_is_told_before_anything_starts(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_function(path)


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        (1, Reward(1.0, True)),
        (0.25, Reward(0.25, False)),
        (True, Reward(1.0, True)),
        (False, Reward(0.0, False)),
        (Reward(0.5, True), Reward(0.5, True)),
    ],
)
def test_what_a_function_may_return(pair, given: Any, reward: Reward) -> None:
    seen = []

    def function(prompt: Any, rollout: Any) -> Any:
        seen.append((prompt.answer, rollout.text))
        return given

    assert by_function(*pair("4", "#5"), function=function) == reward and seen == [("4", "#5")]


@pytest.mark.parametrize("given", [None, "1", [1.0]])
def test_anything_else_is_an_error_and_no_verdict(pair, given: Any) -> None:
    with pytest.raises(TypeError, match="a number, a boolean or a Reward"):
        by_function(*pair("4", "#5"), function=lambda prompt, rollout: given)


@contextmanager
def serving(answer: Callable[[dict[str, Any], Any], tuple[int, bytes]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            code, body = answer(asked, self.headers)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=120)


def ask(url: str, both: Any, token_env: str | None = None, timeout_s: float = 60.0) -> Reward:
    return by_http(*both, url=url, token_env=token_env, timeout_s=timeout_s)


def test_everything_a_judge_needs_is_sent(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    seen: list[Any] = []

    def answer(asked: dict[str, Any], headers: Any) -> tuple[int, bytes]:
        seen.append((asked, headers["authorization"]))
        return 200, b'{"score": 0.75}'

    with serving(answer) as url:
        both = pair("4", "é #5", FinishReason.LENGTH, "sums", {"level": 3})
        assert ask(url, both, "JUDGE_TOKEN") == Reward(0.75, False)
    expected = {"prompt": "a question", "answer": "4", "response": "é #5", "finished": False, "task": "sums",
                "meta": {"level": 3}}  # fmt: skip
    assert seen == [(expected, "Bearer secret")]


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        (b'{"score": 1}', Reward(1.0, True)),
        (b'{"score": 1, "correct": false}', Reward(1.0, False)),
        (b'{"score": -2.5, "correct": true, "more": 1}', Reward(-2.5, True)),
    ],
)
def test_verdicts(pair, body: bytes, reward: Reward) -> None:
    with serving(lambda asked, headers: (200, body)) as url:
        assert ask(url, pair("4", "#5")) == reward


@pytest.mark.parametrize(
    ("code", "body", "said"),
    [
        (500, b"out of memory", "answered 500: out of memory"),
        (404, b"", "answered 404"),
        (200, b"fine", "no JSON: fine"),
        (200, b"", "no JSON"),
        (200, b"[1]", 'without a number "score"'),
        (200, b'{"score": "1"}', 'without a number "score"'),
        (200, b'{"score": true}', 'without a number "score"'),
        (200, b'{"score": 1, "correct": "yes"}', "neither true nor false"),
        (200, b'{"score": 1, "x": "' + b"y" * 2**21 + b'"}', "no JSON"),
    ],
)
def test_what_is_no_verdict_is_an_error(pair, code: int, body: bytes, said: str) -> None:
    with serving(lambda asked, headers: (code, body)) as url, pytest.raises(ValueError, match=said):
        ask(url, pair("4", "#5"))


def test_a_judge_that_never_answers_is_waited_for_as_long_as_said(pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        ask(f"http://127.0.0.1:{silent.getsockname()[1]}/", pair("4", "#5"), timeout_s=0.3)
