"""`longtail serve` as a person starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.serve_model import Where, _take_token
from services.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0
URL = re.compile(r"is served: (\S+)")


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the URL that it told."""
    command = [sys.executable, "-m", "deploy", "serve", "pocket", "--in-process", "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        told = ""
        while not (found := URL.search(told)):
            line = process.stderr.readline()
            assert line, f"it ended: {told}"
            told += line
        yield process, found[1]
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


@pytest.mark.slow
def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test\n")
    token.chmod(0o600)
    quick = ["--set", "speculation.selector.calibrate_s=0", "--name", "mine", "--token-file", str(token)]
    with started(*quick) as (process, url):
        right = {"Authorization": "Bearer a-token-of-this-test"}
        assert httpx.get(f"{url}/models", timeout=WAIT_S).status_code == 401
        body = {"model": "mine", "prompt": "1+2=", "max_tokens": 4}
        answer = httpx.post(f"{url}/completions", json=body, headers=right, timeout=WAIT_S)
        assert answer.status_code == 200 and answer.json()["model"] == "mine"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "no run folder (config.yaml) and no model folder"),
        (["pocket", "--checkpoint", "last"], "newest, best, or the number of a step"),
        (["pocket", "--host", "0.0.0.0"], "LONGTAIL_TOKEN"),
        (["pocket", "--follow"], "name a run"),
        (["pocket", "--set", "placement.address=auto"], "a Ray of its own"),
        (["pocket", "--chat-template", "nowhere.jinja"], "cannot read the chat template"),
    ],
)
def test_mistakes_are_told_before_anything_starts(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and told in result.stderr


def test_a_token_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGTAIL_TOKEN", raising=False)
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test\n")
    token.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        _take_token(Where("0.0.0.0", 0, token))
