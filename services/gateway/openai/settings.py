"""What is served, and how much of it at a time."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.types import ServedVersions


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """`token` None: whoever reaches the port may ask. `max_len` bounds prompt + answer, `max_choices` the answers of
    one request, `request_s` the time from the request to the last token. `hosts`: names in the Host header, "*" any."""

    model: str
    created: int
    stop_token_ids: tuple[int, ...]
    max_len: int
    max_choices: int = 16
    request_s: float = 300.0
    token: str | None = None
    hosts: tuple[str, ...] = ("*",)
    max_body_bytes: int = 2**20


def fingerprint(versions: ServedVersions) -> str:
    """The `system_fingerprint` of an answer: the versions that made it."""
    drafter = "none" if versions.drafter is None else versions.drafter
    return f"policy-{versions.policy}-drafter-{drafter}"
