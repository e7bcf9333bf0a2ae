"""A Prometheus of this machine's own, from its package, that scrapes runs: configuration, start, end."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.core.errors import ConfigError, ServiceLostError, WaitTimeoutError
from services.report.records import write_atomic
from services.report.run_folder import ENDPOINT_FILE

RULES = Path(__file__).parent / "rules"
RULE_FILES = ("recording.yaml", "alerts.yaml")
HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
# A head node's end point has all its values only every ten seconds or so (pitfall 75).
RAY_INTERVAL_S = 15


@dataclass(frozen=True)
class ServerOptions:
    """`data` keeps samples and configuration; `ray_targets`: Ray's own service discovery file, None without."""

    port: int
    interval_s: int
    data: Path
    ray_targets: Path | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def endpoint_files(path: Path) -> list[Path]:
    """Of one run folder, or of all run folders in a folder. Raises ConfigError when it is neither."""
    if (path / "config.yaml").is_file():
        return [path / ENDPOINT_FILE] if (path / ENDPOINT_FILE).is_file() else []
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder: name a run folder, or the folder that holds them (run.dir)")
    return sorted(path.glob(f"*/{ENDPOINT_FILE}"))


def targets_of(files: Sequence[Path]) -> list[Any]:
    """What they list together; a run that ended meanwhile has taken its file away."""
    found: list[Any] = []
    for file in files:
        try:
            found += json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
    return found


def write_targets(path: Path, data: Path) -> int:
    """List what serves metrics under `path` for the running Prometheus; returns how many."""
    targets = targets_of(endpoint_files(path))
    write_atomic(data / "targets.json", json.dumps(targets) + "\n")
    return len(targets)


def server_config(options: ServerOptions) -> dict[str, Any]:
    jobs = [_job("longtail", options.data / "targets.json", options.interval_s)]
    if options.ray_targets is not None:
        jobs.append(_job("ray", options.ray_targets, max(RAY_INTERVAL_S, options.interval_s)))
    return {
        "global": {"scrape_interval": f"{options.interval_s}s", "evaluation_interval": f"{options.interval_s}s"},
        "rule_files": [str(RULES / name) for name in RULE_FILES],
        "scrape_configs": jobs,
    }


def _job(name: str, targets: Path, interval_s: int) -> dict[str, Any]:
    discovery = {"files": [str(targets.resolve())], "refresh_interval": "2s"}
    return {"job_name": name, "scrape_interval": f"{interval_s}s", "file_sd_configs": [discovery]}


@contextmanager
def prometheus_running(options: ServerOptions) -> Iterator[subprocess.Popen[bytes]]:
    """Answering when entered, ended when left. Raises ConfigError when it cannot be started."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise ConfigError("there is no `prometheus` on PATH: install it, on Debian with apt-get install prometheus")
    _check_port(options.port)
    options.data.mkdir(parents=True, exist_ok=True)
    config = options.data / "prometheus.yml"
    write_atomic(config, yaml.safe_dump(server_config(options), sort_keys=False))
    command = [
        binary, f"--config.file={config}", f"--storage.tsdb.path={options.data / 'samples'}",
        f"--web.listen-address={HOST}:{options.port}",
    ]  # fmt: skip
    log = options.data / "prometheus.log"
    with open(log, "wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            _await_ready(process, options, log)
            yield process
        finally:
            _end(process)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"port {port} of {HOST} cannot be used ({error.strerror}): choose another one") from error


def _await_ready(process: subprocess.Popen[bytes], options: ServerOptions, log: Path) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise ServiceLostError("prometheus", f"it ended at once: {last_line(log)} (all of it in {log})")
        try:
            with urllib.request.urlopen(f"{options.url}/-/ready", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    raise WaitTimeoutError(f"prometheus did not answer at {options.url} within {START_TIMEOUT_S:.0f} s: see {log}")


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)
