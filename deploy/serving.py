"""A policy and its drafter as a Ray Serve application: `deploy.serving:served`, in a Serve config or with `serve run`.

    applications:
      - name: model
        route_prefix: /
        import_path: deploy.serving:served
        args: {source: {path: /shared/runs/my-run, checkpoint: best}, max_replicas: 4}

Two deployments: `api` speaks HTTP and holds the tokenizer, each replica of `model` holds an engine with the weights.
Another source in the user_config of `model` is loaded by the replicas that run, without refusing a request; other
arguments start other replicas. The token comes from LONGTAIL_TOKEN in the environment, never from the arguments, which
Serve shows.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from actors.serving import HandleGenerator, ModelServer
from deploy.serving_learning import KEEP_STATES, build_learner, check_learning, told_at_start
from deploy.serving_source import ModelSource, read_weights, serving_config
from deploy.token import VARIABLE
from services.config.schema import ClusterConfig
from services.gateway.openai.app import build_openai_app
from services.gateway.openai.settings import ServingSettings
from services.gateway.settings import LOOPBACK_NAMES
from services.models.tokenizer import Tokenizer, load_tokenizer
from services.rollout.generator import EngineGenerator, ModelWeights
from services.rollout.service import build_engine

LOG = logging.getLogger("ray.serve")  # a replica's own file
API, MODEL, APPLICATION = "api", "model", "longtail-serving"


class ServeArguments(BaseModel):
    """`settings`: overrides of the configuration, such as rollout.engine.max_running=8. `max_waiting`: answers that
    wait in each replica before requests are turned away. `chat_template`: Jinja text in place of the model's own.
    `allow_hosts`: names in the Host header beside those of the loopback address; with a token any name will do.
    `learn_to`: a folder that all servers see: the drafter learns from what is served, in idle moments, and better
    versions go there; none: it does not learn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: ModelSource
    settings: tuple[str, ...] = ()
    name: str | None = None
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    max_waiting: int = Field(256, ge=0)
    max_choices: int = Field(16, ge=1)
    request_s: float = Field(300.0, gt=0)
    chat_template: str | None = None
    allow_hosts: tuple[str, ...] = ()
    learn_to: str | None = None

    @property
    def model_name(self) -> str:
        return self.name or self.source.name


class ServedText:
    """The tokenizer as the gateway asks it."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.decode, self.settled, self.token_bytes = tokenizer.decode, tokenizer.settled, tokenizer.token_bytes

    def encode_prompt(self, text: str) -> list[int]:
        return self._tokenizer.render(text, chat_template=False)

    def render_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self._tokenizer.render_messages(messages, self._template)


def serving_settings(args: ServeArguments, config: ClusterConfig, tokenizer: Tokenizer) -> ServingSettings:
    token = os.environ.get(VARIABLE) or None
    engine = config.rollout.engine
    return ServingSettings(
        model=args.model_name,
        created=int(time.time()),
        stop_token_ids=config.rollout.sampling.stop_token_ids or tokenizer.eos_token_ids,
        max_len=engine.max_len,
        max_choices=min(args.max_choices, engine.max_running),
        request_s=args.request_s,
        token=token,
        hosts=("*",) if token else (*LOOPBACK_NAMES, *(h.lower() for h in args.allow_hosts)),
    )


def config_of_server(args: ServeArguments) -> ClusterConfig:
    """Raises ConfigError."""
    config = serving_config(args.source, args.settings)
    if args.learn_to is None:
        return config
    check_learning(config)
    return serving_config(args.source, (*args.settings, KEEP_STATES))


def build_generator(args: ServeArguments) -> EngineGenerator:
    config = config_of_server(args)
    engine, after_load = build_engine(config, 0)
    learner = None
    if args.learn_to is not None:
        learner = build_learner(config, Path(args.learn_to))
        LOG.info(told_at_start(config, Path(args.learn_to)))
    most = config.rollout.engine.max_running, args.max_waiting
    return EngineGenerator(engine, *most, time.monotonic, after_load, learner)


def weights_of(args: ServeArguments, source: Mapping[str, Any]) -> ModelWeights:
    """Of another source of the same model."""
    return read_weights(ModelSource.model_validate(dict(source)), config_of_server(args))


def build_api(args: ServeArguments) -> Any:
    """The ASGI application, in a replica of `api`."""
    config = config_of_server(args)
    tokenizer = load_tokenizer(config.model.path)
    app_name = serve.get_replica_context().app_name
    generator = HandleGenerator(serve.get_deployment_handle(MODEL, app_name=app_name))
    text = ServedText(tokenizer, args.chat_template)
    return build_openai_app(generator, text, serving_settings(args, config, tokenizer))


def serve_config(args: ServeArguments, source: ModelSource | None = None) -> dict[str, Any]:
    """The application as an entry of a Serve config; `source`: swapped to in place of the one in `args`."""
    model = {"name": MODEL, "user_config": (source or args.source).model_dump()}
    return {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "deploy.serving:served",
        "args": args.model_dump(exclude_defaults=True),
        "deployments": [model],
    }


def served(args: dict[str, Any]) -> serve.Application:
    """What a Serve config names; see `deploy.serve.live`. Raises ConfigError for what cannot be served."""
    return _application(ServeArguments.model_validate(args))


def _application(args: ServeArguments) -> serve.Application:
    config = config_of_server(args)
    place, engine = config.placement, config.rollout.engine
    scaling = {
        "min_replicas": args.min_replicas,
        "max_replicas": max(args.min_replicas, args.max_replicas),
        "target_ongoing_requests": max(1, engine.max_running // 2),  # from there on a round gets slow
    }
    model = serve.deployment(ModelServer).options(
        name=MODEL,
        autoscaling_config=scaling,
        user_config=args.source.model_dump(),
        max_ongoing_requests=engine.max_running + args.max_waiting,
        max_queued_requests=max(1, args.max_waiting),
        ray_actor_options={"num_cpus": place.cpus_per_slot, "num_gpus": place.gpus_per_slot},
        health_check_period_s=2.0,
        health_check_timeout_s=60.0,
        graceful_shutdown_timeout_s=args.request_s,
    )

    def build() -> Any:  # Serve wants a plain function
        return build_api(args)

    api = serve.deployment(serve.ingress(build)()).options(
        name=API,
        num_replicas=1,
        max_ongoing_requests=4000,
        ray_actor_options={"num_cpus": 0.2},
        graceful_shutdown_timeout_s=args.request_s,
    )
    return api.bind(model.bind(partial(build_generator, args), partial(weights_of, args)))
