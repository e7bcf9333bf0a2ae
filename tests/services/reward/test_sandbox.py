"""The real sandbox: what code out of a response may not do. Skipped where the system allows no user namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.config.reward import SandboxConfig
from services.core.errors import ConfigError
from services.core.types import Reward
from services.reward.sandbox import _command, by_tests, check_sandbox, last_block, run

LIMITS = SandboxConfig()
RIGHT, WRONG = Reward(1.0, True), Reward(0.0, False)


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    try:
        check_sandbox(LIMITS)
    except ConfigError as error:
        pytest.skip(str(error))


def in_block(code: str, language: str = "python") -> str:
    return f"So it is\n```{language}\n{code}\n```\nand nothing else."


def score(pair, response: str, tests: str = "assert add(1, 2) == 3", timeout_s: float = 60.0) -> Reward:
    return by_tests(*pair(tests, response), limits=LIMITS, timeout_s=timeout_s)


ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize("language", ["python", "py", "", "python3"])
def test_code_that_passes_its_tests(pair, language: str) -> None:
    assert score(pair, in_block(ADD, language)) == RIGHT


@pytest.mark.parametrize(
    "response",
    [
        ADD,  # no block
        f"```python\n{ADD}",  # not closed
        f"<think>{in_block(ADD)}",  # not out of the thinking
        in_block(ADD.replace("+", "-")),
        in_block(ADD) + in_block("add = None"),  # the last one counts
        in_block("def add(a, b) return a + b"),
        in_block("import sys; sys.exit(0)"),  # before the tests
        in_block("import os; os._exit(0)"),
        in_block("raise SystemExit"),
        in_block("import sys; sys.stderr.write('x' * 10**9)"),
        in_block("while True: pass"),
        in_block("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        in_block("\udcff".encode("utf-8", "surrogatepass").decode("utf-8", "replace")),
    ],
)
def test_what_earns_nothing(pair, response: str) -> None:
    assert score(pair, response, timeout_s=2.0) == WRONG


def test_blocks_after_the_thinking_only() -> None:
    assert last_block(f"<think>{in_block('a')}</think>{in_block('b')}") == "b\n"
    assert last_block(in_block("a") + in_block("b", "bash")) == "a\n"
    assert last_block("```python\n```") == ""


REFUSED = {
    "the network": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "any network": "import socket; socket.create_connection(('8.8.8.8', 53), 2)",
    "files of others": "open({own!r}, 'a')",
    "new files elsewhere": "open('/etc/longtail-was-here', 'w')",
    "taking its folder away": "import subprocess; subprocess.run(['umount', '/tmp'], check=True)",
    "more memory": "x = b'a' * 2**31",
    "more on the disk": "open('/tmp/f', 'wb').write(b'a' * 2**25)",
    "more processes": "import os\nwhile True: os.fork()",
    "processes outside": "import os; os.kill({pid}, 0)",
    "becoming somebody": "import os; os.setgroups([0]); os.setuid(1)",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_code_may_not_do(what: str, tmp_path: Path) -> None:
    import socket

    own = tmp_path / "own"
    own.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = REFUSED[what].format(port=server.getsockname()[1], own=str(own), pid=os.getpid())
        assert run(code, LIMITS, 60.0).code not in (0, None)
    assert own.read_text() == "mine"


def test_what_it_writes_is_gone_afterwards() -> None:
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        file = f"{place}/longtail-sandbox-test"
        assert run(f"open({file!r}, 'w').write('x'); print(open({file!r}).read())", LIMITS, 60.0).code == 0
        assert not Path(file).exists()


def test_an_escaped_child_dies_with_the_sandbox() -> None:
    """It would outlive a kill of the process group: it has left the group."""
    token = f"longtail-{os.getpid()}"
    child = f"import os, time\nif os.fork() == 0:\n    os.setsid(); x = {token!r}; time.sleep(600)"
    before = sandboxes()
    assert run(child, LIMITS, 60.0).code == 0
    assert run(child + "\ntime.sleep(600)", LIMITS, 1.0).code is None
    _until(lambda: sandboxes() <= before)


def test_it_dies_with_whoever_waits_for_it() -> None:
    """The pool kills a worker that takes too long: what the worker had started must not stay."""
    before = sandboxes()
    waiting = f"""
import sys; sys.path.insert(0, {str(Path.cwd())!r})
from services.reward.sandbox import *
run("import time; time.sleep(600)", SandboxConfig(), 600.0)
"""
    process = subprocess.Popen([sys.executable, "-c", waiting])
    _until(lambda: sandboxes() > before)
    process.kill()
    process.wait(timeout=120)
    _until(lambda: sandboxes() <= before)


def test_one_that_nobody_waits_for_ends_by_itself() -> None:
    """Killed so early that no link of the chain has asked to die with its parent yet."""
    command = [word for word in _command(LIMITS, 0.5) if word not in ("--pdeathsig", "KILL", "--kill-child")]
    before = sandboxes()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.write(b"import time; time.sleep(600)")
        process.stdin.close()
        _until(lambda: sandboxes() > before)
        process.kill()
    assert sandboxes() > before
    _until(lambda: sandboxes() <= before)


def sandboxes() -> set[int]:
    """Of our user's tree: every Python that reads its code from standard input in isolation."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0] == b"python3" and words[-3:-1] == [b"-I", b"-"]:
                found.add(int(entry.name))
    return found


def _until(true, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_sandbox_that_cannot_be_made_is_no_wrong_answer(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.sandbox.WRITABLE", ("/no/such/folder",))
    with pytest.raises(OSError, match="no/such/folder"):
        score(pair, in_block(ADD))
    with pytest.raises(ConfigError, match="allow user namespaces"):
        check_sandbox(LIMITS)
    with pytest.raises(ConfigError, match=r"reward\.sandbox\.python /no/python is not there"):
        check_sandbox(SandboxConfig(python="/no/python"))
