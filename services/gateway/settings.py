"""How the gateway is run. Plain values; `deploy/` fills them in."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from services.core.errors import ConfigError

LEAST_TOKEN = 16  # characters
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Settings:
    """`token` None: read-only. `hosts`: names that the Host header may carry, without port; "*" takes any. Bodies are
    at most `max_body_bytes` long, a request takes at most `request_s` from its first byte to its last answer."""

    token: str | None = None
    hosts: tuple[str, ...] = LOOPBACK_NAMES
    max_body_bytes: int = 4096
    request_s: float = 120.0  # control waits for a process that connects to Ray
    fresh_s: float = 1.0

    def __post_init__(self) -> None:
        if self.token is not None and (len(self.token) < LEAST_TOKEN or not self.token.isascii()):
            raise ConfigError(f"the control token must have at least {LEAST_TOKEN} ASCII characters: make a longer one")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
