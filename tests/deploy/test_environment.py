"""Which environment an actor sees: the node's, over it the job's, over that what the run sets for each actor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray

from deploy.placement import actor_env

pytestmark = pytest.mark.ray


class Looks:
    def seen(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LONGTAIL_TEST_NODE", "LONGTAIL_TEST_BOTH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "node")
    job = {"env_vars": {"LONGTAIL_TEST_BOTH": "job", "OMP_NUM_THREADS": "job", "MKL_NUM_THREADS": "job"}}
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=job)
    yield
    ray.shutdown()


def test_the_runs_own_wins_over_the_jobs_and_that_over_the_nodes(session: None) -> None:
    actor = ray.remote(Looks).options(num_cpus=0, runtime_env={"env_vars": actor_env(3)}).remote()
    names = "LONGTAIL_TEST_NODE", "LONGTAIL_TEST_BOTH", "OMP_NUM_THREADS", "MKL_NUM_THREADS"
    assert ray.get(actor.seen.remote(*names), timeout=100) == ["node", "job", "3", "3"]
