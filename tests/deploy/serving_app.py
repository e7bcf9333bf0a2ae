"""A model behind the OpenAI API in this process, and the official client."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from openai import OpenAI

from deploy.serve_model import app_here
from deploy.serving import ServeArguments, build_generator, weights_of
from deploy.serving_source import ModelSource
from services.core.types import Rollout
from services.gateway.guard import Guard
from services.rollout.generator import EngineGenerator

WAIT_S = 120.0
TEMPLATE = "{{ '<bos>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
SMALL = ("data.max_prompt_tokens=64", "rollout.sampling.max_tokens=128", "rollout.engine.max_len=256")
EAGLE = '{"type": "fixed", "strategy": {"drafter": "eagle", "depth": 4, "num_draft_tokens": 5}}'
OFF = '{"type": "fixed"}'


def arguments(selector: str = EAGLE, rows: int = 8, **changes: Any) -> ServeArguments:
    settings = (*SMALL, f"rollout.engine.max_running={rows}", f"speculation.selector={selector}")
    values = {"source": ModelSource(path="pocket"), "settings": settings, "chat_template": TEMPLATE, "max_waiting": 64}
    return ServeArguments(**{**values, **changes})


@dataclass(frozen=True)
class Served:
    url: str
    generator: EngineGenerator
    app: Guard

    def client(self, token: str = "none", retries: int = 0) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=retries, timeout=WAIT_S)


@contextmanager
def served_here(args: ServeArguments) -> Iterator[Served]:
    generator = build_generator(args)
    try:
        asyncio.run(generator.swap(weights_of(args, args.source.model_dump()), WAIT_S))
        app = app_here(args, generator)
        with listening(app) as url:
            yield Served(url, generator, app)
    finally:
        generator.close()


@contextmanager
def standing(generator: EngineGenerator) -> Iterator[None]:
    """The engine makes no token meanwhile, however fast the machine is, and still hears what is asked."""
    engine = generator._engine
    step = engine.step

    def still(wait_s: float) -> Sequence[Rollout]:
        time.sleep(0.01)
        return ()

    engine.step = still  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """`app` on a real port, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started, "the server listens")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)


def until(condition: Any, what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}"
        time.sleep(0.01)


def chunk_texts(chunks: Any) -> list[str]:
    return [c.choices[0].text for c in chunks if c.choices]


def folder_of(path: Path, files: dict[str, str]) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8")
    return path
