"""Two policy workers of Ray Train behind the calls of one policy trainer, in real processes (gloo)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.clients import RayPolicyClient
from actors.policy_team import WorkerPlace
from deploy.cluster import remote_class
from deploy.placement import actor_env, team_env
from deploy.session import ray_session
from services.config.schema import ClusterConfig
from services.core.checkpoints import CheckpointNote, CheckpointPlan, DataPosition, whole_checkpoints
from services.core.errors import BatchError, DataError, ServiceLostError, TransferError
from services.policy.service import PolicyService, build_policy_service
from tests.actors.team_processes import team_workers
from tests.actors.transfers import Receiver, bits
from tests.deploy.tiny_run import make_model_folder, tiny_run
from tests.services.policy.teams import VOCAB, batch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_S = 240.0


@dataclass
class PolicyTeam:
    config: ClusterConfig
    handle: Any
    client: RayPolicyClient
    checkpoints: Path
    one: PolicyService  # of the same policy, in this process
    node: str


def start(config: ClusterConfig, checkpoints: CheckpointPlan | None = None) -> Any:
    place = WorkerPlace(0.3, 0.0, {}, actor_env(1))
    options = {"num_cpus": 0, "runtime_env": {"env_vars": actor_env(1) | team_env(config)}}
    return remote_class("policy_team", config).options(**options).remote(config, place, checkpoints)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyTeam]:
    folder = tmp_path_factory.mktemp("team")
    config = tiny_run(
        make_model_folder(folder),
        folder,
        placement={"policy_workers": 2, "policy_cpus": 0.3},
        policy={"threads": 1, "zero_variance": "keep", "learning_rate": 0.01},
        weights={"transport": "collective", "part_bytes": 20_000},
        coordinator={"start_timeout_s": WAIT_S, "call_timeout_s": 120.0},
    )
    with ray_session(config):
        handle = start(config, CheckpointPlan(folder / "checkpoints"))
        client = RayPolicyClient("policy", handle)
        client.process_id().result(WAIT_S)
        node = ray.get_runtime_context().get_node_id()
        yield PolicyTeam(config, handle, client, folder / "checkpoints", build_policy_service(config), node)
        ray.kill(handle)


def test_it_trains_publishes_and_keeps_as_one_does(team: PolicyTeam) -> None:
    assert team.client.restored()[0].result(WAIT_S) is None
    for step in (1, 2):
        report, chunk, hidden = team.client.train_step(batch(step))
        ours, theirs = team.one.train_step(batch(step)), report.result(WAIT_S)
        assert theirs.loss == pytest.approx(ours[0].loss, rel=1e-3 if step > 1 else 1e-5)
        assert theirs.grad_norm == pytest.approx(ours[0].grad_norm, rel=1e-3 if step > 1 else 1e-5)
        assert chunk.result(WAIT_S) == ours[1]
        states = ray.get(hidden, timeout=WAIT_S)
        assert [s.input_ids.tolist() for s in states] == [s.input_ids.tolist() for s in ours[2]]
    version, blob, _ = team.client.publish()
    assert version.result(WAIT_S) == team.one.version == 2
    tensors, (_, expected) = ray.get(blob, timeout=WAIT_S), team.one.publish()
    assert tensors.keys() == expected.keys()
    # AdamW divides by the gradient's size: where a gradient is little more than rounding, the sums of two workers may
    # take another step than that of one, so single elements may differ by up to a step (0.01).
    for name, tensor in expected.items():
        assert (tensors[name] - tensor).abs().mean() < 1e-5, name
        torch.testing.assert_close(tensors[name], tensor, atol=0.01, rtol=0.0)

    team.client.checkpoint(CheckpointNote(2, 3, DataPosition("abc")), None, None).result(WAIT_S)
    team.client.flush(60.0).result(WAIT_S)
    (place,) = whole_checkpoints(team.checkpoints)
    again = build_policy_service(team.config, checkpoints=CheckpointPlan(team.checkpoints, place))
    assert (again.version, again.steps_done) == (2, 2)
    _, kept = again.publish()
    assert all(torch.equal(t, tensors[name]) for name, t in kept.items())


def test_a_refused_batch_costs_no_worker(team: PolicyTeam) -> None:
    report, _, _ = team.client.train_step(batch(1))
    with pytest.raises(BatchError, match="the policy has trained on step 2, step 1 came after it"):
        report.result(WAIT_S)
    bad = batch(3)
    broken = replace(bad.rollouts[0], prompt_ids=(VOCAB,))
    report, _, _ = team.client.train_step(replace(bad, rollouts=(broken, *bad.rollouts[1:])))
    with pytest.raises(BatchError, match="has token ids outside"):
        report.result(WAIT_S)
    assert team.client.steps_done().result(WAIT_S) == 2


def test_servers_fetch_what_it_offers_from_the_worker_that_has_it(team: PolicyTeam) -> None:
    client = RayPolicyClient("policy", team.handle, offers=True)
    version, offer, _ = client.publish()
    assert version.result(WAIT_S) == 2
    pending, blob = client.copy_of(2)
    assert pending.result(WAIT_S) == 2
    copy = {name: bits(t) for name, t in ray.get(blob, timeout=WAIT_S).items()}
    receiver = ray.remote(Receiver).options(num_cpus=0).remote("rollout-0", team.config.weights)
    _, found = ray.get(receiver.fetch.remote(offer), timeout=WAIT_S)
    ray.kill(receiver)
    assert found == copy
    with pytest.raises(TransferError, match="superseded"):
        client.copy_of(1)[0].result(WAIT_S)


def test_on_cpus_it_has_no_gpu_to_measure(team: PolicyTeam) -> None:
    seat = ray.get(team.handle.gpu_seat.remote(), timeout=WAIT_S)
    assert (seat.node, seat.entries) == (team.node, ())


def test_with_one_worker_the_team_is_lost(team: PolicyTeam) -> None:
    """The last of this team: the cause is told, also to later calls, and the others end with the leader."""
    before = team_workers()
    assert len(before) == 2
    os.kill(before[1], signal.SIGKILL)
    report, _, _ = team.client.train_step(batch(3))
    with pytest.raises(ServiceLostError, match="policy is lost: worker"):
        report.result(WAIT_S)
    with pytest.raises(ServiceLostError, match="policy is lost: worker"):
        team.client.steps_done().result(WAIT_S)
    ray.kill(team.handle)
    give_up_s = time.monotonic() + WAIT_S
    while team_workers() and time.monotonic() < give_up_s:
        time.sleep(0.1)
    assert team_workers() == []


def test_a_team_that_cannot_begin_says_why(team: PolicyTeam, tmp_path: Path) -> None:
    """After the team before it has ended. Its model folder went away."""
    model = team.config.model.model_copy(update={"path": str(tmp_path / "gone")})
    handle = start(team.config.model_copy(update={"model": model}))
    with pytest.raises(DataError, match="gone"):
        RayPolicyClient("policy", handle).process_id().result(WAIT_S)
    ray.kill(handle)
