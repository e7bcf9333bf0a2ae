from __future__ import annotations

import pytest

from actors.energy import GpuSeat
from deploy.colocation import require_shared, slot_nodes, worker_selectors
from services.config.load import load_config
from services.core.errors import ConfigError

SHARED = "placement={policy: colocated, gpus_per_slot: 0.6, policy_gpus: 0.4, policy_workers: 2}"
SLOTS = {"slot 0": GpuSeat("n1", ("0",)), "slot 1": GpuSeat("n1", ("1",))}


def test_each_worker_goes_to_its_slots_machine() -> None:
    config = load_config(overrides=[SHARED, "rollout.num_servers=3"])
    assert worker_selectors(config, ["n1", "n2", "n2"]) == [{"ray.io/node-id": "n1"}, {"ray.io/node-id": "n2"}]


def test_without_gpus_there_is_nothing_to_share() -> None:
    config = load_config(overrides=["placement={policy: colocated, policy_workers: 2}"])
    assert worker_selectors(config, ["n1", "n2"]) == []
    assert slot_nodes(None, 1.0) == []


def test_a_policy_on_the_slots_gpus_is_as_it_should_be() -> None:
    require_shared(SLOTS | {"policy": GpuSeat("n1", ("1", "0"))})
    require_shared(SLOTS | {"policy": GpuSeat("n1", ("1",))})


@pytest.mark.parametrize(
    "policy", [GpuSeat("n1", ("0", "2")), GpuSeat("n2", ("0",)), GpuSeat("n1", ("1", "1"))],
    ids=["a free GPU", "another machine", "two on one"],
)  # fmt: skip
def test_a_policy_elsewhere_is_refused_with_the_remedy(policy: GpuSeat) -> None:
    with pytest.raises(ConfigError, match="no more GPUs than there are slots"):
        require_shared(SLOTS | {"policy": policy})
