"""Whether somebody listens where a Ray should be, without Ray: it would try for two minutes to find out."""

from __future__ import annotations

import socket

CONNECT_S = 10.0


def why_unreachable(address: str) -> str | None:
    """Why HOST:PORT takes no connection, None when it does; `auto` and `ray://` addresses are left to Ray."""
    if "://" in address or ":" not in address:
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None
