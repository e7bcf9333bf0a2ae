"""Verifiers that others bring: a Python function by its dotted path, and a service behind HTTP."""

from __future__ import annotations

import importlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from services.core.errors import ConfigError
from services.core.types import FinishReason, Prompt, Reward, Rollout

ANSWER_BYTES = 2**20  # of an HTTP verifier; more is no verdict
SHOWN_CHARS = 200


def load_function(path: str) -> Callable[[Prompt, Rollout], Any]:
    """Raises ConfigError when there is no such module or name in it, or when importing it fails."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"reward.function {path}: {error}: it must be importable where the reward workers run (on a cluster: in "
            "the working directory that the job brings, or installed)"
        ) from error
    if not callable(found):
        raise ConfigError(f"reward.function {path} is {type(found).__name__}, not a function of (prompt, rollout)")
    return found  # type: ignore[no-any-return]


def by_function(prompt: Prompt, rollout: Rollout, *, function: Callable[[Prompt, Rollout], Any]) -> Reward:
    """What it returns may be a Reward, a number (correct from 1 on), or a boolean."""
    found = function(prompt, rollout)
    if isinstance(found, Reward):
        return found
    if isinstance(found, bool | int | float):
        return Reward(value=float(found), correct=float(found) >= 1.0)
    raise TypeError(f"reward.function returned {type(found).__name__}: a number, a boolean or a Reward is needed")


def by_http(prompt: Prompt, rollout: Rollout, *, url: str, token_env: str | None, timeout_s: float) -> Reward:
    """Raises OSError and ValueError; what is raised is no verdict."""
    question = {
        "prompt": prompt.text,
        "answer": prompt.answer,
        "response": rollout.text,
        "finished": rollout.finish_reason is FinishReason.STOP,
        "task": prompt.task,
        "meta": dict(prompt.meta),
    }
    headers = {"content-type": "application/json"}
    if token_env is not None:
        headers["authorization"] = f"Bearer {os.environ[token_env]}"
    request = urllib.request.Request(url, json.dumps(question).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            body = answer.read(ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answered {error.code}: {error.read(SHOWN_CHARS).decode(errors='replace')}") from error
    return _verdict(url, body)


def _verdict(url: str, body: bytes) -> Reward:
    shown = body[:SHOWN_CHARS].decode(errors="replace")
    try:
        told = json.loads(body)
    except ValueError:
        raise ValueError(f"{url} answered no JSON: {shown}") from None
    score = told.get("score") if isinstance(told, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f'{url} answered without a number "score": {shown}')
    correct = told.get("correct", score >= 1)
    if not isinstance(correct, bool):
        raise ValueError(f'{url} answered "correct" that is neither true nor false: {shown}')
    return Reward(value=float(score), correct=correct)
