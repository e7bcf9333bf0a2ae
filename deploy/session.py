"""Being connected to Ray: a private one on this machine, or a cluster's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from deploy.console import CONSOLE
from deploy.naming import NAMESPACE
from deploy.placement import machine_cpus
from deploy.processes import descendants, end_processes
from deploy.reaching import why_unreachable
from deploy.survey import require_fit
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError


@contextmanager
def ray_session(config: ClusterConfig, check: bool = True) -> Iterator[None]:
    """A private Ray on this machine, or a connection to `placement.address`. Leaves no process behind. With `check` it
    raises ConfigError naming what the run would miss there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = config.placement.address
    own: dict[str, Any] = {
        "num_cpus": machine_cpus(),
        "include_dashboard": False,
        "object_store_memory": config.placement.object_store_bytes,
    }
    if address is not None:
        require_answering(address)
    else:
        _require_store(config.placement.object_store_bytes)
    before = descendants()
    try:
        ray.init(
            address=address if address is not None else "local",
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=True,
            **({} if address is not None else own),
        )
    except (ConnectionError, RayError) as error:
        raise _unreachable(address, str(error).splitlines()[0]) from None
    try:
        for warning in require_fit(config) if check else ():
            CONSOLE.print(f"warning: {warning}", soft_wrap=True)
        yield
    finally:
        started = [p for p in descendants() if p not in before]
        ray.shutdown()
        end_processes(started)


def _require_store(wanted: int) -> None:
    """Raises ConfigError for an object store beyond this machine's memory; Ray's own words are a traceback."""
    there = psutil.virtual_memory().total
    if wanted > there:
        raise ConfigError(
            f"placement.object_store_bytes {wanted} is more than this machine's memory, {there} bytes: lower it"
        )


def ray_about() -> dict[str, str | None]:
    """What another process of this user needs to connect to the same Ray: where its head answers (HOST:PORT), and
    whether it asks for a token. Ray asks for one by itself where `ray.init` starts it; the token is in the user's home.
    """
    return {"address": ray.get_runtime_context().gcs_address, "auth_mode": os.environ.get("RAY_AUTH_MODE")}


@contextmanager
def joined(address: str) -> Iterator[None]:
    """A connection to a Ray that is there already, to look at it. Raises ConfigError."""
    require_answering(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RayError) as error:
        raise _unreachable(address, str(error).splitlines()[0]) from None
    try:
        yield
    finally:
        ray.shutdown()


def require_answering(address: str) -> None:
    """Raises ConfigError where nobody listens."""
    reason = why_unreachable(address)
    if reason is not None:
        raise _unreachable(address, reason)


def _unreachable(address: str | None, reason: str) -> ConfigError:
    return ConfigError(
        f"no Ray answers at placement.address {address}: {reason}; start one, name another address, or leave it out "
        "for a private Ray"
    )
