"""How many model servers there are and how much each takes, as Ray Serve is told; nothing is started."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from ray import serve

from deploy.serving import API, MODEL, ServeArguments, serve_config, served
from deploy.serving_source import ModelSource

SOURCE = {"path": "pocket"}


def deployments(**arguments: Any) -> dict[str, Any]:
    """By name; `model` is bound into `api`."""
    api = served({"source": SOURCE, **arguments})._bound_deployment
    (model,) = (a._bound_deployment for a in api.init_args if isinstance(a, serve.Application))
    assert (api.name, model.name) == (API, MODEL)
    return {d.name: d for d in (api, model)}


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [({}, 1, 1), ({"min_replicas": 2}, 2, 2), ({"min_replicas": 2, "max_replicas": 5}, 2, 5)],
)
def test_servers_come_and_go_between_the_bounds(asked: dict[str, int], least: int, most: int) -> None:
    scaling = deployments(**asked)[MODEL]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (least, most)


@pytest.mark.parametrize("rows", [2, 8, 32])
def test_another_server_comes_before_one_is_full_and_429_after(rows: int) -> None:
    found = deployments(settings=[f"rollout.engine.max_running={rows}"], max_waiting=40, max_replicas=3)
    model, api = found[MODEL]._deployment_config, found[API]._deployment_config
    assert 1 <= model.autoscaling_config.target_ongoing_requests <= max(1, rows // 2)
    assert model.max_ongoing_requests == rows + 40, "the server itself turns away what is more, with Retry-After"
    assert model.max_queued_requests == 40 and api.autoscaling_config is None and api.num_replicas == 1
    assert api.max_ongoing_requests > 3 * model.max_ongoing_requests


def test_a_server_that_goes_ends_its_answers_first() -> None:
    for deployment in deployments(request_s=77.0).values():
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 77.0


def test_a_swap_is_another_user_config_and_nothing_else() -> None:
    args = ServeArguments(source=ModelSource(path="runs/a", checkpoint=1), max_replicas=2)
    before, after = serve_config(args), serve_config(args, ModelSource(path="runs/a", checkpoint=2))
    (own,), (other,) = before.pop("deployments"), after.pop("deployments")
    assert before == after
    assert own["user_config"] != other["user_config"] and own["name"] == other["name"] == MODEL


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"min_replicas": 0}, {"max_waiting": -1}, {"request_s": 0}, {"replicas": 2}):
        with pytest.raises(ValidationError):
            served({"source": SOURCE, **wrong})
