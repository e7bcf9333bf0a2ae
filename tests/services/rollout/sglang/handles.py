"""Waiting for what a handle tells."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.core.types import SamplingParams
from services.rollout.sglang.handle import Asked, Update
from services.rollout.sglang.launch import SGLangHandle
from tests.services.rollout.engines import strategy

SAMPLING = SamplingParams(temperature=0.8, max_tokens=9, stop_token_ids=(2,))
STOP, LENGTH = {"type": "stop", "matched": 2}, {"type": "length", "length": 9}
CHAIN = strategy("eagle", 3)


def asked(*rids: str, window: int | None = None) -> list[Asked]:
    return [Asked(rid, (1, 2), SAMPLING, 0, window) for rid in rids]


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.005)


def news(handle: SGLangHandle) -> list[Update]:
    found = handle.poll(60.0)
    assert found
    return found
