"""Energy meters as real Ray actors, on a Ray that only believes in its GPUs; the counters are scripted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.clients import RayEnergyClient, RayWaiter
from actors.energy import GpuSeat, own_seat
from deploy.metering import plan_meters, seats, start_meters
from services.coordinator.calls import Calls
from services.coordinator.metering import Metering
from services.core.energy import GpuName
from services.core.errors import ServiceLostError
from services.core.types import RunEvent, SlotSpan
from services.energy.nvml import open_nvml
from tests.services.energy.scripted import ScriptedReader

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def three_gpus() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, num_gpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Computing:
    """An actor with GPUs, as far as its seat goes."""

    def gpu_seat(self) -> GpuSeat:
        return own_seat()


def steady(entries: Sequence[str]) -> ScriptedReader:
    """GPU i draws 100 (i + 1) watts."""
    values = {f"GPU-{e}": lambda t, e=e: 100.0 * (int(e) + 1) * t for e in entries}
    return ScriptedReader(time.monotonic, values, {e: f"GPU-{e}" for e in entries})


def start(gpus: float, **options: Any) -> Any:
    return ray.remote(Computing).options(num_cpus=0, num_gpus=gpus, **options).remote()


def test_each_holder_tells_its_gpus_and_one_meter_a_node_watches_them(three_gpus: None) -> None:
    group = placement_group([{"GPU": 2.0}])
    ray.get(group.ready(), timeout=60)
    handles = {
        "rollout-0": start(2, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)),
        "drafter-0": start(0),
        "policy": start(0.5),
    }
    placed = seats(handles, 60.0)
    assert placed.keys() == {"slot 0", "policy"}
    assert len(placed["slot 0"].entries) == 2 and len(placed["policy"].entries) == 1
    meters, users = plan_meters(placed)
    ((name, seat),) = meters.items()
    assert seat.node == ray.get_runtime_context().get_node_id() and set(seat.entries) == {"0", "1", "2"}
    assert users["policy"] == (GpuName(name, placed["policy"].entries[0]),)
    for handle in handles.values():
        ray.kill(handle)
    remove_placement_group(group)


class Noted:
    """A clock that remembers what it said."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def __call__(self) -> float:
        self.told.append(time.monotonic())
        return self.told[-1]


def test_joules_come_from_the_actor_to_the_role_that_spent_them(
    three_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters are read at any speed of the machine: compared is with the seconds that the meter's clock told. Where
    both clocks stand is known to half of the fastest answer, so a few are asked for first."""
    monkeypatch.setattr("services.coordinator.metering.CALL_TIMEOUT_S", 60.0)
    node = ray.get_runtime_context().get_node_id()
    meters, users = plan_meters({"slot 0": GpuSeat(node, ("0", "1")), "policy": GpuSeat(node, ("2",))})
    started = start_meters(meters, steady)
    clients = [RayEnergyClient(name, handle) for name, handle in started.items()]
    told: list[RunEvent] = []

    def tell(kind: str, subject: str, message: str) -> RunEvent:
        told.append(RunEvent(0.0, kind, subject, message))
        return told[-1]

    clock = Noted()
    metering = Metering(clients, users, Calls(RayWaiter(), time.monotonic), clock, tell)
    for _ in range(20):
        metering.begin()
        metering.end([])
    for _ in range(2):
        clock.told.clear()
        metering.begin()
        time.sleep(0.6)
        turned = time.monotonic()
        metering.span(SlotSpan("slot 0", "rollout", clock.told[0], turned))
        time.sleep(0.3)
        ended = time.monotonic()
        joules = metering.end([SlotSpan("slot 0", "drafting", turned, ended)])
        begun, closed, *_ = clock.told
        assert joules is not None and not told
        assert joules["rollout"] == pytest.approx(300.0 * (turned - begun), abs=30.0)
        assert joules["drafting"] == pytest.approx(300.0 * (ended - turned), abs=30.0)
        assert joules["policy"] == pytest.approx(300.0 * (closed - begun), abs=30.0)
        assert joules["idle"] == pytest.approx(300.0 * (closed - ended), abs=30.0)
    ray.kill(started["energy-0"])
    with pytest.raises(RayActorError):  # it may answer until its end has come
        while True:
            ray.get(started["energy-0"].__ray_ready__.remote(), timeout=60)
    metering.begin()
    assert metering.end([]) is None
    assert [e.kind for e in told] == ["energy_missing"]


def test_an_actor_on_a_machine_without_a_driver_says_so(three_gpus: None) -> None:
    if open_nvml([]) is not None:
        pytest.skip("this machine has an NVIDIA driver")
    node = ray.get_runtime_context().get_node_id()
    handles = start_meters({"energy-0": GpuSeat(node, ("0",))})
    assert RayEnergyClient("energy-0", handles["energy-0"]).read(None).result(60.0).absent
    ray.kill(handles["energy-0"])


def test_actors_without_gpus_need_no_meter(three_gpus: None) -> None:
    handles = {"rollout-0": start(0), "policy": start(0)}
    meters, users = plan_meters(seats(handles, 60.0))
    assert meters == {} and users == {} and start_meters(meters) == {}
    ray.kill(handles["policy"])
    with pytest.raises(ServiceLostError, match="policy"):
        seats(handles, 60.0)
    ray.kill(handles["rollout-0"])


def test_two_machines_have_a_meter_each() -> None:
    placed = {
        "slot 0": GpuSeat("node a", ("0",)),
        "slot 1": GpuSeat("node b", ("0",)),
        "slot 2": GpuSeat("node b", ()),
        "policy": GpuSeat("node a", ("GPU-1",)),
    }
    meters, users = plan_meters(placed)
    assert meters == {"energy-0": GpuSeat("node a", ("0", "GPU-1")), "energy-1": GpuSeat("node b", ("0",))}
    assert users == {
        "slot 0": (GpuName("energy-0", "0"),),
        "slot 1": (GpuName("energy-1", "0"),),
        "policy": (GpuName("energy-0", "GPU-1"),),
    }
