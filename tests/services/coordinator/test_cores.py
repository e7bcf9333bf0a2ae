from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from deploy.cli_shared import config_of
from services.coordinator.cores import Cores, shared_cores

counts = st.integers(1, 64)


def test_idle_slots_train_on_the_cores_that_servers_leave() -> None:
    two = Cores(2, 1, 1)
    assert [two.trainers(n) for n in range(5)] == [2, 1, 0, 0, 0]
    assert [Cores(16, 2, 4).trainers(n) for n in (1, 4, 6, 7, 9)] == [3, 2, 1, 0, 0]


@given(counts, counts, counts, st.integers(0, 64))
def test_no_core_is_given_away_twice(total: int, per_server: int, per_trainer: int, generating: int) -> None:
    cores = Cores(total, per_server, per_trainer)
    trainers = cores.trainers(generating)
    if total < per_server + per_trainer:
        assert trainers == 1, "a single core trains too, or nobody ever would"
    else:
        assert trainers == 0 or generating * per_server + trainers * per_trainer <= total
        assert (trainers + 1) * per_trainer + generating * per_server > total
        assert cores.trainers(1) >= 1, "beside one server there is room"


def test_only_slots_without_gpus_of_a_machine_that_is_known_share_cores() -> None:
    mine = len(os.sched_getaffinity(0))
    assert shared_cores(config_of("pocket-spot", [])) == Cores(mine, 1, 1)
    assert shared_cores(config_of("pocket-spot", ["placement.cores=3", "drafter.threads=2"])) == Cores(3, 1, 2)
    assert shared_cores(config_of("pocket-spot", ["placement.address=auto"])) is None
    assert shared_cores(config_of("pocket-spot", ["placement.address=auto", "placement.cores=8"])) == Cores(8, 1, 1)
    assert shared_cores(config_of("pocket-spot", ["placement.gpus_per_slot=1"])) is None
    assert shared_cores(config_of("reasoner-sglang", [])) is None
