"""What keeps a run from being placed is named before anything waits (pitfall 64)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.fitting import Room, misfits
from tests.services.coordinator.world import tiny_config


def room(name: str = "a", cpus: float = 2.0, gpus: float = 0.0, roles: str = "") -> Room:
    return Room(name, {"CPU": cpus, "GPU": gpus}, {f"longtail.io/{role}": "true" for role in roles.split()})


def told(placement: dict[str, Any], *rooms: Room) -> list[str]:
    return list(misfits(tiny_config(placement=placement), rooms))


def test_two_cores_hold_the_default_run() -> None:
    assert told({}, room()) == []


@pytest.mark.parametrize(
    ("placement", "has", "missing"),
    [
        ({"cpus_per_slot": 2.0}, room(cpus=2), "4.5 CPU, the cluster has 2"),
        ({"gpus_per_slot": 1.0}, room(cpus=8), "2 GPU, the cluster has 0"),
        ({"policy_gpus": 1.0, "gpus_per_slot": 1.0}, room(cpus=8, gpus=2), "3 GPU, the cluster has 2"),
    ],
)
def test_a_cluster_that_is_too_small_in_all_is_named(placement: dict[str, float], has: Room, missing: str) -> None:
    (message,) = told(placement, has)
    assert missing in message and "lower rollout.num_servers" in message


def test_a_slot_that_fits_no_single_machine_is_told_with_what_the_closest_lacks() -> None:
    (message,) = told(
        {"gpus_per_slot": 1.0, "cpus_per_slot": 3.0, "policy_cpus": 0.5},
        room("a", cpus=2, gpus=4), room("b", cpus=2, gpus=1), room("c", cpus=8),
    )  # fmt: skip
    assert message.startswith("a slot needs 3 CPU, 1 GPU on one machine, and no machine has that; the closest, ")
    assert "lacks 1 CPU" in message or "lacks 1 GPU" in message


def test_slots_that_fit_one_by_one_but_not_beside_the_policy_trainer_are_told() -> None:
    place = {"gpus_per_slot": 1.0, "cpus_per_slot": 1.0, "policy_gpus": 2.0, "policy_cpus": 2.0}
    rooms = room("a", cpus=8, gpus=2), room("b", cpus=1, gpus=2)
    (message,) = told(place, *rooms)
    assert message.startswith("only 1 of 2 slots") and "b has 1 CPU, 2 GPU" in message


@pytest.mark.parametrize(
    ("strategy", "fits"), [("PACK", True), ("SPREAD", True), ("STRICT_PACK", False), ("STRICT_SPREAD", True)]
)
def test_the_strategy_counts(strategy: str, fits: bool) -> None:
    place = {"strategy": strategy, "cpus_per_slot": 1.0}
    assert (told(place, room("a", cpus=1.5), room("b", cpus=1)) == []) is fits


def test_strictly_spread_slots_need_as_many_machines() -> None:
    (message,) = told({"strategy": "STRICT_SPREAD"}, room("a", cpus=64))
    assert "only 1 of 2 slots" in message and "STRICT_SPREAD" in message


def test_roles_need_machines_with_their_labels() -> None:
    place = {"role_labels": True, "address": "auto"}
    (message,) = told(place, room("a", roles="rollout"))
    assert "no machine has the label longtail.io/policy=true" in message
    assert told(place, room("a", roles="rollout"), room("b", roles="policy")) == []
    (message,) = told({**place, "cpus_per_slot": 1.0}, room("a", cpus=1, roles="rollout"), room("b", roles="policy"))
    assert "only 1 of 2 slots" in message


def test_policy_workers_are_packed_and_slots_get_what_they_leave() -> None:
    place = {"policy_workers": 3, "policy_gpus": 1.0, "policy_cpus": 1.0, "gpus_per_slot": 1.0, "cpus_per_slot": 1.0}
    assert told(place, room("a", cpus=8, gpus=2), room("b", cpus=8, gpus=3)) == []
    (message,) = told(place, room("a", cpus=8, gpus=2), room("b", cpus=8, gpus=2))
    assert "need 5 GPU, the cluster has 4; lower rollout.num_servers, placement.policy_workers, " in message
    (message,) = told(place, room("a", cpus=1, gpus=4), room("b", cpus=9, gpus=1))
    assert message.startswith("3 policy workers (1 CPU, 1 GPU each) do not fit: a has 1 CPU, 4 GPU; b has 9 CPU, 1 GPU")
    (message,) = told(place, room("a", cpus=3, gpus=4), room("b", cpus=2, gpus=1))
    assert message.startswith("only 1 of 2 slots") and "beside 3 policy workers (1 CPU, 1 GPU each)" in message


def test_no_machine_holds_even_one_worker() -> None:
    (message,) = told({"policy_workers": 2, "policy_cpus": 3.0, "cpus_per_slot": 0.5}, room(cpus=2), *[room("b")] * 9)
    assert message.startswith("a policy worker needs 3 CPU")


amounts = st.integers(0, 4).map(float)


@given(
    rooms=st.lists(st.tuples(amounts, amounts), min_size=1, max_size=4),
    slots=st.integers(1, 3),
    seed=amounts,
    workers=st.integers(1, 3),
)
def test_more_machines_never_hurt(rooms: list[tuple[float, float]], slots: int, seed: float, workers: int) -> None:
    config = tiny_config(
        rollout={"num_servers": slots},
        placement={"cpus_per_slot": 1.0, "gpus_per_slot": seed, "policy_cpus": 1.0, "policy_workers": workers},
    )
    made = [room(str(i), cpus, gpus) for i, (cpus, gpus) in enumerate(rooms)]
    if not list(misfits(config, made)):
        assert not list(misfits(config, [*made, room("more", 4, 4)]))
