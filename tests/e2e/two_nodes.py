"""A Ray cluster of two nodes on one machine, with a cable between them that can be cut.

Each node lives in a network namespace and a process namespace of its own; so does the switch between them, which has
an address too, for what belongs to no node (Redis). Nothing outside these namespaces is touched, and several such
clusters can exist at once.

    head 10.77.0.1 ──┐
    worker 10.77.0.2 ─┴─ switch 10.77.0.254
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HEAD, WORKER, SWITCH = "10.77.0.1", "10.77.0.2", "10.77.0.254"
GCS = f"{HEAD}:6380"
DASHBOARD = f"http://{HEAD}:8265"
TOKEN = "0123456789abcdef0123456789abcdef"
REDIS_PORT = "6399"
READY_S = 180.0

# A dead node is found within 20 s. Shorter time-outs find living ones dead where many processes share few cores.
FAST_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "180",
}
AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


def reason_to_skip(*tools: str) -> str | None:
    """Why such a cluster can't be made here; None when it can."""
    missing = [tool for tool in ("ip", "unshare", *tools) if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}: on Debian, apt-get install iproute2 util-linux redis-server"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    probe = Network()
    try:
        probe.make()
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    finally:
        probe.remove()
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=120)


def wait_until(what: str, happened: Callable[[], bool], timeout_s: float) -> float:
    """Seconds it took. Raises TimeoutError naming `what`."""
    started = time.monotonic()
    while not happened():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"{what} did not happen within {timeout_s:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - started


@dataclass
class Network:
    """`key` tells the namespaces of clusters that exist at once apart."""

    key: str = field(default_factory=lambda: secrets.token_hex(2))

    def space(self, name: str) -> str:
        return f"lt{self.key}{name}"

    def make(self) -> None:
        switch = self.space("switch")
        for name in ("switch", "head", "worker"):
            _ip("netns", "add", self.space(name))
            _ip("-n", self.space(name), "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "addr", "add", f"{SWITCH}/24", "dev", "bridge0")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for name, address in (("head", HEAD), ("worker", WORKER)):
            space, port = self.space(name), f"to-{name}"
            _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "route", "add", "default", "via", SWITCH)

    def remove(self) -> None:
        """Also what `make` left half done."""
        made = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=120, check=False).stdout
        for name in ("head", "worker", "switch"):
            if self.space(name) in made:
                _ip("netns", "del", self.space(name))

    def cut(self, name: str) -> None:
        _ip("-n", self.space(name), "link", "set", "eth0", "down")

    def heal(self, name: str) -> None:
        space = self.space(name)
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "route", "replace", "default", "via", SWITCH)  # it went with the link

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.space(name), *command]


@dataclass
class Node:
    """One machine's Ray. Killing it takes every process of it, as a power cut does."""

    network: Network
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        assert self.process is None
        self.starts += 1
        temp = self.folder / f"{self.name[0]}{self.starts if self.name != 'head' else ''}"  # sockets want short paths
        shutil.rmtree(temp, ignore_errors=True)  # a new machine; the head's folder keeps its name in what Redis holds
        command = [
            "unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
            str(BIN / "ray"), "start", *self.arguments, "--temp-dir", str(temp), "--disable-usage-stats", "--block",
        ]  # fmt: skip
        with open(self.folder / f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(
                self.network.command(self.name, command), env={**os.environ, **self.environment}, stdout=log, stderr=log
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(timeout=120)
            self.process = None

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def restart_once_ended(self, timeout_s: float) -> None:
        """What Kubernetes does with a pod: a node that the cluster gave up ends by itself, and another one starts."""
        wait_until(f"the end of the {self.name} node", self.ended, timeout_s)
        self.process = None
        self.start()


@dataclass
class TwoNodes:
    network: Network
    head: Node
    worker: Node
    folder: Path
    environment: dict[str, str]

    def run(self, command: Sequence[str], timeout_s: float, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """On the head's machine."""
        return subprocess.run(
            self.network.command("head", command), cwd=cwd, env={**os.environ, **self.environment},
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def alive_nodes(self) -> int:
        code = (
            "import ray, json; ray.init(address='auto', log_to_driver=False, logging_level='ERROR'); "
            "print(json.dumps(sum(n['Alive'] for n in ray.nodes())))"
        )
        done = self.run([sys.executable, "-c", code], 60)
        return int(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else 0

    def wait_for_nodes(self, count: int, timeout_s: float = READY_S) -> None:
        def up() -> bool:
            assert not self.head.ended() and not self.worker.ended(), self.logs()
            return self.answers() and self.alive_nodes() == count

        wait_until(f"a cluster of {count} nodes", up, timeout_s)

    def answers(self) -> bool:
        """Whether the head's port is open; a Ray that connects before that waits for half a minute."""
        code = f"import socket; socket.create_connection(({HEAD!r}, 6380), 2)"
        return self.run([sys.executable, "-c", code], 30).returncode == 0

    def logs(self) -> str:
        return "\n".join(f"== {f.name}\n{f.read_text()[-3000:]}" for f in sorted(self.folder.glob("*.log")))


@contextmanager
def redis_server(network: Network, folder: Path) -> Iterator[None]:
    """Beside the switch, so that it outlives every node."""
    command = ["redis-server", "--port", REDIS_PORT, "--requirepass", TOKEN, "--save", "", "--dir", str(folder)]
    with open(folder / "redis.log", "wb") as log:
        process = subprocess.Popen(network.command("switch", command), stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait(timeout=120)


@contextmanager
def two_nodes(head_cpus: int = 1, worker_cpus: int = 1, redis: bool = False) -> Iterator[TwoNodes]:
    """Both nodes up; with `redis` a head that is restarted remembers the cluster. The head has two GPUs to believe in,
    the worker one; its role is rollout, the head's are all."""
    folder, network = Path(tempfile.mkdtemp(prefix="lt", dir="/tmp")), Network()
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # as with an activated virtual environment, or in an image
    shared = {**FAST_HEALTH, **AUTH, "PATH": path, "RAY_ADDRESS": GCS, "RAY_API_SERVER_ADDRESS": DASHBOARD}
    per_node = {name: value for name, value in shared.items() if "ADDRESS" not in name}
    keeps = (
        {"RAY_REDIS_ADDRESS": f"{SWITCH}:{REDIS_PORT}", "RAY_external_storage_namespace": "longtail"} if redis else {}
    )
    password = ("--redis-password", TOKEN) if redis else ()
    store = ("--object-store-memory", "200000000")
    head = Node(network, "head", (
        "--head", "--node-ip-address", HEAD, "--port", "6380", "--num-cpus", str(head_cpus), "--num-gpus", "2",
        "--labels", "longtail.io/head=true,longtail.io/policy=true,longtail.io/rollout=true",
        "--dashboard-host", HEAD, "--dashboard-port", "8265", *store, *password,
    ), {**per_node, **keeps}, folder)  # fmt: skip
    worker = Node(network, "worker", (
        "--address", GCS, "--node-ip-address", WORKER, "--num-cpus", str(worker_cpus), "--num-gpus", "1",
        "--labels", "longtail.io/rollout=true", *store,
    ), per_node, folder)  # fmt: skip
    cluster = TwoNodes(network, head, worker, folder, shared)
    network.make()
    try:
        with redis_server(network, folder) if redis else nullcontext():
            yield from _up(cluster)
    finally:
        network.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _up(cluster: TwoNodes) -> Iterator[TwoNodes]:
    try:
        cluster.head.start()
        cluster.wait_for_nodes(1)
        cluster.worker.start()
        cluster.wait_for_nodes(2)
        yield cluster
    finally:
        cluster.worker.kill()
        cluster.head.kill()
