"""The control token: from the environment, or from a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from services.core.errors import ConfigError

VARIABLE = "LONGTAIL_TOKEN"


@dataclass(frozen=True, slots=True)
class Token:
    """`source` says where a person finds it; `chosen`: set by a person, not made here."""

    value: str
    source: str
    chosen: bool


def token_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "longtail" / "token"


def control_token() -> Token:
    """LONGTAIL_TOKEN, or the file's content; the file is made when it is missing.

    Raises ConfigError when others can read the file, or when it cannot be made or is empty.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Token(chosen.strip(), f"the environment variable {VARIABLE}", chosen=True)
    path = token_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make(path)
        value = read_token(path)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be used ({error.strerror}): set {VARIABLE} instead") from error
    return Token(value, str(path), chosen=False)


def _make(path: Path) -> None:
    """Under its name only once it is whole, so that another process never reads half of it."""
    if path.exists():
        return
    temporary = path.with_name(f".token-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # another process was quicker
    finally:
        temporary.unlink()


def read_token(path: Path) -> str:
    """Raises ConfigError when others can read the file, or when it is empty; OSError when it cannot be read."""
    with open(path, encoding="ascii", errors="replace") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ConfigError(f"others can read the token file {path}: chmod 600 it, or delete it for a new one")
        value = file.read().strip()
    if not value:
        raise ConfigError(f"the token file {path} is empty: delete it for a new one")
    return value
