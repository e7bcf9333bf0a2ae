"""The live page as a Ray Serve application: `deploy.serve:live`, in a Serve config or with `serve run`.

    applications:
      - name: live
        route_prefix: /
        import_path: deploy.serve:live
        args: {runs_dir: /shared/runs, allow_hosts: [runs.example.org]}

It runs inside the Ray of the runs and asks them directly. The token comes from LONGTAIL_TOKEN in the replica's
environment, never from the arguments, which Serve shows; without it the page is read-only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve

from deploy.control import RayChannel
from deploy.token import VARIABLE
from services.gateway.app import build_app
from services.gateway.settings import LOOPBACK_NAMES, Settings
from services.gateway.source import FolderSource


class LiveArguments(BaseModel):
    """`runs_dir` must be readable where the replica runs. `allow_hosts`: names in the Host header beside those of the
    loopback address, which a port-forward has."""

    model_config = ConfigDict(extra="forbid")

    runs_dir: str
    allow_hosts: tuple[str, ...] = ()
    num_cpus: float = 0.2


def live(args: dict[str, Any]) -> serve.Application:
    """What a Serve config names. Serve makes a model of the arguments only where it finds the class itself as the
    annotation, and postponed annotations are text."""
    return live_page(LiveArguments.model_validate(args))


def live_page(args: LiveArguments) -> serve.Application:
    """The application; one replica, because readers are cheap and share its answers."""

    def build() -> Any:
        token = os.environ.get(VARIABLE) or None
        settings = Settings(token=token, hosts=(*LOOPBACK_NAMES, *(h.lower() for h in args.allow_hosts)))
        return build_app(FolderSource(Path(args.runs_dir)), RayChannel() if token else None, settings)

    options = {"num_cpus": args.num_cpus}
    wrapped = serve.deployment(
        name="live", num_replicas=1, max_ongoing_requests=2000, ray_actor_options=options, graceful_shutdown_timeout_s=5
    )(serve.ingress(build)())
    return wrapped.bind()
