"""`longtail page`: the live page and its API on a port of this machine, without Ray."""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path
from typing import Any

import uvicorn
from rich.console import Console
from uvicorn.protocols.http.h11_impl import H11Protocol

from deploy.control import ProcessChannel
from deploy.token import VARIABLE, Token, control_token
from services.core.errors import ConfigError
from services.gateway.app import build_app
from services.gateway.settings import LOOPBACK_NAMES, Settings, is_loopback
from services.gateway.source import FolderSource

HEADER_S = 10.0  # for a whole request header, from the connection or from the answer before
MAX_CONNECTIONS = 4000
BACKLOG = 2048
CONSOLE = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


class PatientProtocol(H11Protocol):
    """Uvicorn's, which lets a client that never ends its header hold a connection for ever: here it is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()

    def _watch(self) -> None:
        cycle = self.cycle
        self.loop.call_later(HEADER_S, lambda: self._expire(cycle))

    def _expire(self, before: Any) -> None:
        """No request began since: `cycle` is that of the one under way, or of the last."""
        if self.cycle is before and not self.transport.is_closing():
            self.transport.close()


def settings_for(host: str, token: Token | None, allow_hosts: tuple[str, ...]) -> Settings:
    """Raises ConfigError for an address that others can reach, without a token that a person chose."""
    if is_loopback(host):
        names = LOOPBACK_NAMES
    else:
        if token is not None and not token.chosen:
            raise ConfigError(
                f"{host} can be reached from other machines: set {VARIABLE} to a token of your own, or serve "
                "without control (--read-only)"
            )
        names = (*LOOPBACK_NAMES, *(() if host in ("0.0.0.0", "::") else (in_url(host),)))
    return Settings(token=token.value if token else None, hosts=(*names, *(h.lower() for h in allow_hosts)))


def serve_page(
    runs_dir: Path, host: str, port: int, address: str | None, read_only: bool, allow_hosts: tuple[str, ...]
) -> None:
    """Until Ctrl-C. Raises ConfigError for what cannot be served."""
    source = FolderSource(runs_dir)
    token = None if read_only else control_token()
    settings = settings_for(host, token, allow_hosts)
    app = build_app(source, None if token is None else ProcessChannel(runs_dir, address), settings)
    listening = listen(host, port)
    raise_file_limit()
    CONSOLE.print(f"runs in {runs_dir}: http://{in_url(host)}:{listening.getsockname()[1]}/")
    CONSOLE.print("read-only" if token is None else f"control token: in {token.source}")
    config = uvicorn.Config(
        app, http=PatientProtocol, ws="none", log_level="warning", server_header=False, access_log=False,
        limit_concurrency=MAX_CONNECTIONS, backlog=BACKLOG, timeout_keep_alive=int(HEADER_S), lifespan="off",
        timeout_graceful_shutdown=3,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listening])


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def listen(host: str, port: int) -> socket.socket:
    """Bound before anything is printed, so that the address that is told is the one that answers."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(found[0], found[1])
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[4])
        listening.listen(BACKLOG)  # a browser that comes before the server is ready waits
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port"
        ) from None
    return listening


def raise_file_limit() -> None:
    """Every connection is a file; the usual soft limit of 1024 is less than we take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 200
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
