"""`longtail serve`: a model behind the OpenAI API on a port of this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from deploy.page import BACKLOG, CONSOLE, HEADER_S, MAX_CONNECTIONS, PatientProtocol, in_url, listen, raise_file_limit
from deploy.serving import (
    APPLICATION,
    ServeArguments,
    ServedText,
    build_generator,
    config_of_server,
    serve_config,
    serving_settings,
    weights_of,
)
from deploy.serving_learning import told_at_start
from deploy.serving_source import ModelSource, checkpoint_of
from deploy.session import ray_session
from deploy.token import VARIABLE, read_token
from services.core.checkpoints import step_of
from services.core.errors import ConfigError, DataError, WaitTimeoutError
from services.gateway.guard import App
from services.gateway.openai.app import build_openai_app
from services.gateway.settings import Settings, is_loopback
from services.models.tokenizer import load_tokenizer
from services.rollout.generator import EngineGenerator

LOAD_S = 600.0
LOOK_S = 0.2
FOLLOW_S = 2.0  # between two looks for a newer checkpoint
CLOSING_S = 5.0


@dataclass(frozen=True)
class Where:
    """`follow`: swap to the run's checkpoints as they are written. `in_process`: one engine in this process, no Ray."""

    host: str
    port: int
    token_file: Path | None = None
    follow: bool = False
    in_process: bool = False


def serve_model(args: ServeArguments, where: Where) -> None:
    """Until Ctrl-C. Raises LongtailError for what cannot be served."""
    _take_token(where)
    config = config_of_server(args)
    load_tokenizer(config.model.path)
    if config.placement.address is not None and not where.in_process:
        raise ConfigError(
            f"placement.address is {config.placement.address}, and `serve` starts a Ray of its own: add --set "
            "placement.address=null, or put deploy.serving:served into the Serve config of that cluster"
        )
    if where.follow and (not args.source.is_run or where.in_process):
        raise ConfigError("--follow swaps to the newer checkpoints of a run, on Ray: name a run, without --in-process")
    if args.source.is_run:
        CONSOLE.print(f"checkpoint: {checkpoint_of(args.source)}")
    if args.learn_to is not None:
        _make_folder(Path(args.learn_to))
        CONSOLE.print(told_at_start(config, Path(args.learn_to)))
    if where.in_process:
        _serve_here(args, where)
        return
    with ray_session(config, check=False), application(args, where.host, where.port) as port:
        _tell(args, where, port)
        _follow(args, where.follow)


def _take_token(where: Where) -> None:
    """Into the environment, where replicas look for it."""
    if where.token_file is not None:
        try:
            os.environ[VARIABLE] = read_token(where.token_file)
        except OSError as error:
            raise ConfigError(f"cannot read the token file {where.token_file} ({error.strerror})") from None
    if not is_loopback(where.host) and not os.environ.get(VARIABLE):
        raise ConfigError(
            f"{where.host} can be reached from other machines: set {VARIABLE} or name a --token-file, so that not "
            "everybody may ask"
        )
    Settings(token=os.environ.get(VARIABLE) or None)  # raises ConfigError for one that is too short


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: better drafters cannot be put there ({error.strerror})") from None


def _serve_here(args: ServeArguments, where: Where) -> None:
    listening = listen(where.host, where.port)
    raise_file_limit()
    generator = build_generator(args)
    try:
        asyncio.run(generator.swap(weights_of(args, args.source.model_dump()), LOAD_S))
        _tell(args, where, listening.getsockname()[1])
        config = uvicorn.Config(
            app_here(args, generator), http=PatientProtocol, ws="none", log_level="warning", server_header=False,
            access_log=False, limit_concurrency=MAX_CONNECTIONS, backlog=BACKLOG, timeout_keep_alive=int(HEADER_S),
            lifespan="off", timeout_graceful_shutdown=int(CLOSING_S),
        )  # fmt: skip
        server = uvicorn.Server(config)
        server.run(sockets=[listening])
        if server.should_exit:  # it took the signal for itself, and gives it on only where nothing ignores it
            raise KeyboardInterrupt
    finally:
        generator.close()


def app_here(args: ServeArguments, generator: EngineGenerator) -> App:
    """The application over an engine in this process."""
    config = config_of_server(args)
    tokenizer = load_tokenizer(config.model.path)
    text = ServedText(tokenizer, args.chat_template)
    return build_openai_app(generator, text, serving_settings(args, config, tokenizer))


@contextmanager
def application(args: ServeArguments, host: str, port: int) -> Iterator[int]:
    """The Serve application in the Ray that is connected; gives the port that answers. Raises ConfigError when the
    port is taken, and what `deploy` does."""
    with listen(host, port) as free:  # told at once; Serve itself binds it again
        port = free.getsockname()[1]
    serve.start(http_options={"host": host, "port": port, "request_timeout_s": None})
    try:
        deploy(args)
        yield port
    finally:
        serve.shutdown()


def deploy(args: ServeArguments, source: ModelSource | None = None) -> None:
    """Start the application, or make the one that runs swap to another source; returns when its replicas serve it.
    Raises DataError when they cannot, and WaitTimeoutError.

    As a Serve config: with `serve.run` the replicas would be started anew for another user_config.
    """
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [serve_config(args, source)]}))
    end_s = time.monotonic() + LOAD_S
    while (state := serve.status().applications[APPLICATION]).status != ApplicationStatus.RUNNING:
        if state.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            told = " ".join(d.message for d in state.deployments.values() if d.message) or state.message
            raise DataError(f"the model cannot be served: {told}")
        if time.monotonic() > end_s:
            raise WaitTimeoutError(f"the model servers were not ready within {LOAD_S:g} s ({state.status.value})")
        time.sleep(LOOK_S)


def _follow(args: ServeArguments, follow: bool) -> None:
    now = checkpoint_of(args.source) if follow else None
    while True:
        time.sleep(FOLLOW_S)
        now = now and swap_to_newer(args, now)


def swap_to_newer(args: ServeArguments, now: Path) -> Path:
    """The checkpoint that is served from now on: another one than `now` when the run has gone on."""
    newer = _newer(args.source, now)
    if newer != now:
        deploy(args, args.source.model_copy(update={"checkpoint": step_of(newer)}))
        CONSOLE.print(f"checkpoint: {newer}")
    return newer


def _newer(source: ModelSource, now: Path) -> Path:
    """The one to serve; the one served as long as there is none, since a run that is begun anew takes its own away."""
    try:
        return checkpoint_of(source)
    except DataError:
        return now


def _tell(args: ServeArguments, where: Where, port: int) -> None:
    url = f"http://{in_url(where.host)}:{port}/v1"
    CONSOLE.print(f"{args.model_name} is served: {url}")
    guarded = bool(os.environ.get(VARIABLE))
    bearer = f' -H "Authorization: Bearer ${VARIABLE}"' if guarded else ""
    body = f'{{"model": "{args.model_name}", "prompt": "1+2=", "max_tokens": 32}}'
    CONSOLE.print(f"curl {url}/completions -H 'Content-Type: application/json'{bearer} -d {shlex.quote(body)}")
