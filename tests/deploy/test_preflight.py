from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.fitting import Room
from deploy.node_facts import Folder, Gpu, Seen
from deploy.preflight import SUPPORTED, Machine, errors, findings
from services.config.schema import ClusterConfig
from tests.services.coordinator.world import tiny_config

GIB = 2**30
VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cpu", "longtail": "present"}
SEEN = Seen("host", VERSIONS, 64 * GIB)
GPUS = replace(SEEN, gpus=(Gpu("H200", 141 * GIB),) * 2, driver="580.1", driver_cuda="13.0", cuda="13.0")


def machine(seen: Seen | None = SEEN, gpus: float = 0.0, store: float = 4 * GIB, **more: Any) -> Machine:
    room = Room("10.0.0.1", {"CPU": 8.0, "GPU": gpus, "object_store_memory": store}, {})
    return Machine(room, seen, **{"driver": True, **more})


def told(*machines: Machine, config: ClusterConfig | None = None) -> list[str]:
    return [f"{f.level} {f}" for f in findings(config or tiny_config(), machines)]


def test_nothing_is_told_of_machines_that_have_everything() -> None:
    assert told(machine(), machine(driver=False)) == []
    assert told(machine(GPUS, gpus=2)) == []


def test_a_machine_that_does_not_answer_is_an_error() -> None:
    (finding,) = told(machine(), machine(None, silent="no answer within 60 s", driver=False))
    assert finding == "error 10.0.0.1: does not answer: no answer within 60 s"


@pytest.mark.parametrize(
    ("seen", "gpus", "message"),
    [
        (SEEN, 2, "warning .*told of 2 GPUs, but no NVIDIA driver answers"),
        (GPUS, 8, "error .*told of 8 GPUs, but the driver shows 2: .*limit of nvidia.com/gpu"),  # pitfall 72
        (replace(GPUS, driver_cuda="12.4"), 2, "error .*driver 580.1 runs CUDA 12.4, torch is built for 13.0"),
        (replace(SEEN, versions={**VERSIONS, "ray": "2.59.1"}), 0, "error .*ray is 2.59.1, supported is from 2.60"),
        (replace(SEEN, versions={**VERSIONS, "torch": "2.4.0"}), 0, "error .*torch is 2.4.0, supported is from 2.11"),
        (replace(SEEN, folders=(Folder("runs", 0, "/x is not writable"),)), 0, "error .*runs: /x is not writable"),
        (replace(SEEN, folders=(Folder("runs", 10**8),)), 0, "warning .*runs has 0.09 GiB free"),
        (replace(SEEN, ports_taken=(9464,)), 0, "warning .*port 9464 .*is taken"),
    ],
)
def test_what_is_wrong_with_one_machine(seen: Seen, gpus: float, message: str) -> None:
    (finding,) = told(machine(seen, gpus=gpus))
    assert re.match(message, finding)


def test_versions_that_differ_between_machines() -> None:
    other = replace(SEEN, versions={**VERSIONS, "python": "3.12.1", "torch": "2.12.0"})
    assert told(machine(), machine(other, driver=False)) == [
        "error 10.0.0.1: python is 3.12.1, but 3.11.7 where the driver runs",
        "error 10.0.0.1: torch is 2.12.0, but 2.13.0+cpu where the driver runs",
    ]


def test_a_machine_without_longtail_or_torch() -> None:
    other = replace(SEEN, versions={"python": "3.11.7", "ray": "2.60.0"})
    lines = told(machine(), machine(other, driver=False))
    assert len(lines) == 2 and "Longtail is not there" in lines[0] and "torch is not installed" in lines[1]


def test_sglang_is_asked_for_only_where_it_serves() -> None:
    config = ClusterConfig.model_validate({
        "rollout": {"engine": {"type": "sglang"}, "num_servers": 1}, "model": {"path": "x"},
        "placement": {"gpus_per_slot": 1, "policy_gpus": 1, "role_labels": True, "address": "auto"},
    })  # fmt: skip
    both = {"longtail.io/rollout": "true", "longtail.io/policy": "true"}
    server = machine(GPUS, gpus=2)
    server = replace(server, room=replace(server.room, labels=both))
    (finding,) = told(server, machine(driver=False), config=config)
    assert "sglang is not installed: pip install longtail-rl[sglang]" in finding
    ready = replace(GPUS, versions={**VERSIONS, "sglang": "0.5.17"})
    assert told(replace(server, seen=ready), machine(driver=False), config=config) == []


def test_model_files_must_be_there_and_the_same() -> None:
    files = (("config.json", 10), ("model.safetensors", 1000))
    home = machine(replace(SEEN, model_bytes=1000, model_files=files))
    same = machine(replace(SEEN, model_bytes=1000, model_files=files), driver=False)
    assert told(home, same) == []
    (finding,) = told(home, machine(driver=False))
    assert "model.path is not there" in finding
    older = (("config.json", 10), ("model.safetensors", 999))
    (finding,) = told(home, machine(replace(SEEN, model_bytes=999, model_files=older), driver=False))
    assert "holds other files than where the driver runs: model.safetensors" in finding


def test_an_object_store_must_hold_a_policy_and_better_two() -> None:
    files = (("model.safetensors", 3 * GIB),)
    seen = replace(SEEN, model_bytes=3 * GIB, model_files=files)
    assert told(machine(seen, store=6 * GIB)) == []
    assert told(machine(seen, store=4 * GIB))[0].startswith("warning")
    assert told(machine(seen, store=2 * GIB))[0].startswith("error 10.0.0.1: the object store holds 2.0 GiB")


@pytest.mark.parametrize(
    ("gib", "engine", "place", "message"),
    [
        (14, {}, {"policy_gpus": 1.0}, ""),
        (20, {}, {"policy_gpus": 1.0}, "warning .*about 160 GiB for this model .*, the largest GPU here has 141"),
        (40, {}, {"policy_gpus": 1.0}, "error .*the policy trainer keeps weights, gradients"),
        (40, {}, {"policy_gpus": 1.0, "policy_workers": 2}, "warning .*each GPU of 2 about 160 GiB"),
        (40, {}, {"policy_gpus": 1.0, "policy_workers": 4}, ""),
        (40, {}, {}, ""),
        (130, {"mem_fraction": 0.9}, {}, "error .*130 GiB of weights per GPU, .*leaves it 127: raise"),
        (130, {"mem_fraction": 0.9, "tp": 2}, {}, ""),
    ],
)  # fmt: skip
def test_a_model_must_fit_the_gpus(gib: int, engine: dict[str, Any], place: dict[str, float], message: str) -> None:
    engine = {"type": "sglang", "max_running": 8, "max_len": 1024, **engine}
    config = tiny_config(rollout={"engine": engine}, placement={"gpus_per_slot": float(engine.get("tp", 1)), **place})
    files = (("model.safetensors", gib * GIB),)
    seen = replace(GPUS, gpus=GPUS.gpus * 4, model_bytes=gib * GIB, model_files=files)
    found = [f"{f.level} {f}" for f in findings(config, [machine(seen, gpus=8)]) if "GPU" in f.message]
    assert len(found) == bool(message) and all(re.match(message, text) for text in found)


def test_errors_come_first() -> None:
    folders = Folder("runs", 1), Folder("spill", 10**9, "it is not writable")
    found = findings(tiny_config(), [machine(replace(SEEN, folders=folders), gpus=1)])
    assert [f.level for f in found] == ["error", "warning", "warning"] and len(errors(found)) == 1


def test_the_matrix_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14" and SUPPORTED["python"] == ((3, 11), (3, 14))
    pins = "\n".join([*project["dependencies"], *project["optional-dependencies"]["sglang"]])
    assert "ray[default,serve,train]==2.60.*" in pins and SUPPORTED["ray"] == ((2, 60), (2, 61))
    assert "torch>=2.11" in pins and SUPPORTED["torch"][0] == (2, 11)
    assert "sglang==0.5.17" in pins and SUPPORTED["sglang"][0] == (0, 5, 17)
