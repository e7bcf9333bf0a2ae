"""`longtail monitor`: a Prometheus on this machine that watches the runs of a folder, until Ctrl-C."""

from __future__ import annotations

import time
from pathlib import Path

from deploy.monitoring.prometheus_server import (
    ServerOptions,
    endpoint_files,
    last_line,
    prometheus_running,
    write_targets,
)
from services.core.errors import ServiceLostError

LOOK_S = 2.0  # how often to look for runs that began or ended
DASHBOARDS = Path(__file__).parent / "monitoring" / "dashboards"


def monitor(path: Path, options: ServerOptions) -> None:
    """Raises ConfigError when it cannot start, ServiceLostError when Prometheus ends by itself."""
    endpoint_files(path)  # a wrong path is told before anything starts
    options.data.mkdir(parents=True, exist_ok=True)
    known = write_targets(path, options.data)
    with prometheus_running(options) as process:
        print(f"Prometheus: {options.url} (alerts at {options.url}/alerts), samples kept in {options.data}", flush=True)
        print(f"Grafana: add it as a data source and import the dashboards in {DASHBOARDS}", flush=True)
        print(_say(known, path), flush=True)
        while process.poll() is None:
            time.sleep(LOOK_S)
            count = write_targets(path, options.data)
            if count != known:
                known = count
                print(_say(known, path), flush=True)
    raise ServiceLostError("prometheus", f"it ended: {last_line(options.data / 'prometheus.log')}")


def _say(count: int, path: Path) -> str:
    if not count:
        return f"no run in {path} serves metrics now: waiting for one to start"
    return f"{count} {'run serves' if count == 1 else 'runs serve'} metrics"


def data_folder(path: Path) -> Path:
    """Where samples are kept unless another folder is named: beside the run folders."""
    runs = path.parent if (path / "config.yaml").is_file() else path
    return runs / ".prometheus"
