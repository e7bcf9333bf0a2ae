"""Code out of a response, run where it can do no harm: without network, in process and user namespaces of its own, as
nobody, with limits of time, memory and file size; what it writes lies in memory and goes with it. Linux with
util-linux's `unshare`, `setpriv` and `prlimit`, which every image of Debian has.

What is not shut off: reading files that everybody may read.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass

from services.config.reward import SandboxConfig
from services.core.errors import ConfigError
from services.core.types import Prompt, Reward, Rollout
from services.reward.extract import after_thinking

FENCE = re.compile(r"^```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
OPEN_FILES = 64
PROCESSES = 64
LATEST_S = 5  # after its time a sandbox is gone, whoever waits for it
NOBODY = "65534"
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
FOLDER = "/tmp"
WRITABLE = (FOLDER, "/var/tmp", "/dev/shm")
TOOLS = ("unshare", "setpriv", "prlimit")
STARTED = "sandbox-started\n"  # told on standard error by the last link of the chain: what follows is the code's own


@dataclass(frozen=True, slots=True)
class Ran:
    """`code`: exit code, None when it ran out of time; `told`: the end of what it wrote to standard error."""

    code: int | None
    told: str


def last_block(text: str) -> str | None:
    """The last closed fenced block of Python after the thinking; None without one: prose is not run."""
    visible = after_thinking(text)
    blocks = [] if visible is None else FENCE.findall(visible)
    return blocks[-1] if blocks else None


def by_tests(prompt: Prompt, rollout: Rollout, *, limits: SandboxConfig, timeout_s: float) -> Reward:
    """1 when the response's code followed by the prompt's tests comes to its end. No code, a failed test, a crash and
    a time-out are wrong answers; raises OSError when the sandbox itself could not be set up.

    The end leaves a mark that the response cannot know, since leaving with exit code 0 before the tests is the first
    thing that is learned otherwise. Code that searches its own process for the mark would still find it."""
    code = last_block(rollout.text)
    if code is None:
        return Reward(value=0.0, correct=False)
    mark = secrets.token_hex(16)
    tested = f"{code}\n\n{prompt.answer}\n\n__import__('sys').stderr.write('{mark}')\n"
    ran = run(tested, limits, timeout_s)
    passed = ran.code == 0 and ran.told.endswith(mark)
    return Reward(value=float(passed), correct=passed)


def check_sandbox(limits: SandboxConfig) -> None:
    """Raises ConfigError with the remedy where no sandbox can be made."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"reward.verifier code needs {', '.join(missing)}: apt-get install util-linux")
    if shutil.which(limits.python, path=PATH) is None:
        raise ConfigError(f"reward.sandbox.python {limits.python} is not there: name a Python that may run the code")
    try:
        ran = run("print(6 * 7)", limits, 20.0)
    except OSError as error:
        raise ConfigError(
            f"no sandbox can be made here ({error}): allow user namespaces (in Docker: --security-opt seccomp=..., in "
            "Kubernetes: a node with user namespaces), or use another reward.verifier"
        ) from error
    if ran.code != 0:
        raise ConfigError(f"a sandbox was made, but {limits.python} does not run in it: {ran.told or ran.code}")


def run(code: str, limits: SandboxConfig, timeout_s: float) -> Ran:
    """Raises OSError when the sandbox could not be set up: the code did not run then."""
    with tempfile.TemporaryFile() as errors:  # a file has a largest size; a pipe would have to be read without end
        process = subprocess.Popen(
            _command(limits, timeout_s),
            cwd="/",
            env={"PATH": PATH, "HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.communicate(code.encode("utf-8", errors="replace"), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Ran(None, f"longer than {timeout_s:g} s")
        finally:
            _end(process)
        errors.seek(0)
        return _ran(process.returncode, errors.read().decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """The first process of the namespace dies with its parent (--kill-child), and everything in there with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _ran(code: int, errors: str) -> Ran:
    before, started, told = errors.partition(STARTED)
    if not started:
        raise OSError(before.strip()[-300:] or f"exit code {code}")
    return Ran(code, told.strip()[-300:])


def _command(limits: SandboxConfig, timeout_s: float) -> list[str]:
    """Nobody, then namespaces, then a folder in memory over every place that everybody may write to, then no
    capabilities, with which it could be taken away again, and the limits."""
    with_parent = ["setpriv", "--pdeathsig", "KILL", "--no-new-privs"]
    as_nobody = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"] if os.geteuid() == 0 else []
    apart = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork"]
    mounts = "; ".join(f"mount -t tmpfs -o size={limits.file_bytes},mode=1777 none {place}" for place in WRITABLE)
    powerless = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    bounded = [
        "prlimit",
        f"--cpu={math.ceil(timeout_s)}",
        f"--as={limits.memory_bytes}",
        f"--fsize={limits.file_bytes}",
        f"--nofile={OPEN_FILES}",
        f"--nproc={PROCESSES}",
        "--core=0",
    ]
    told = STARTED.strip()
    start = ["sh", "-ec", f'{mounts}; cd {FOLDER}; printf "{told}\\n" >&2; exec "$@"', "sandbox", *powerless, *bounded]
    # Whoever waits may be killed before the chain has asked to die with it: then it ends by itself.
    at_last = ["timeout", "--signal=KILL", str(math.ceil(timeout_s) + LATEST_S)]
    inside = [*apart, "--kill-child", "--mount-proc", *start, *at_last, limits.python, "-I", "-"]
    return [*with_parent, *as_nobody, *inside]
