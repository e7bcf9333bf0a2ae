"""Policies that come part by part: what both engines accept, refuse, and have after a transfer that broke off."""

from __future__ import annotations

import pytest
import torch

from services.core.errors import StaleEpochError, TransferError, WeightError
from services.core.types import ServedVersions
from services.rollout.engine import RolloutEngine
from services.rollout.service import RolloutService
from services.rollout.sglang.engine import SGLangEngine
from services.rollout.sglang.loader import TORN
from services.speculation.strategy import OFF
from tests.services.models.tiny import tensors_of
from tests.services.rollout.coming import Coming
from tests.services.rollout.engines import check_all, group, letters, make_engine, ticking
from tests.services.rollout.sglang.fake import FakeHandle, limits_of
from tests.services.rollout.sglang.serving import CHAIN, DRAFTER, EPOCH, MODEL, OTHER, PROMPT, drain


@pytest.fixture(params=["native", "sglang"])
def service(request: pytest.FixtureRequest) -> RolloutService:
    if request.param == "native":
        engine: RolloutEngine = make_engine(MODEL, CHAIN)
    else:
        engine = SGLangEngine(FakeHandle(MODEL, CHAIN), limits_of(MODEL, CHAIN), {3: CHAIN}, letters, ticking())
        engine.load_policy(0, tensors_of(MODEL))
    engine.load_drafter(0, DRAFTER)
    built = RolloutService(engine, {s.name: s for s in (OFF, CHAIN)}, ticking())
    built.open_epoch(EPOCH)
    return built


def outputs_are_of(model: object, service: RolloutService) -> None:
    found = drain(service, [group(PROMPT, 2)])
    check_all(model, found)  # type: ignore[arg-type]


def test_a_policy_in_parts_is_the_policy(service: RolloutService) -> None:
    coming = Coming(tensors_of(OTHER))
    assert coming.num_parts > 3
    assert service.receive_policy(1, coming, EPOCH) == ServedVersions(1, 0)
    assert coming.came == coming.num_parts and coming.closed == 1
    outputs_are_of(OTHER, service)


@pytest.mark.parametrize("what", ["none", "renamed", "missing", "shape"])
def test_row_30_wrong_names_and_shapes_are_refused_before_anything_comes(service: RolloutService, what: str) -> None:
    tensors = tensors_of(OTHER)
    name, first = next(iter(tensors.items()))
    bad = {
        "none": {},
        "renamed": {f"x.{n}": t for n, t in tensors.items()},
        "missing": {n: t for n, t in tensors.items() if n != name},
        "shape": tensors | {name: first[:-1]},
    }[what]
    coming = Coming(bad)
    with pytest.raises(WeightError, match="nothing changed"):
        service.receive_policy(1, coming, EPOCH)
    assert (coming.came, coming.closed) == (0, 1)
    assert service.open_epoch(EPOCH) == ServedVersions(0, 0)
    outputs_are_of(MODEL, service)


def test_an_older_version_and_a_stale_epoch_are_refused_before_anything_comes(service: RolloutService) -> None:
    service.receive_policy(4, Coming(tensors_of(OTHER)), EPOCH)
    coming = Coming(tensors_of(MODEL))
    with pytest.raises(WeightError, match="version 3 is older than the served 4"):
        service.receive_policy(3, coming, EPOCH)
    with pytest.raises(StaleEpochError):
        service.receive_policy(5, coming, EPOCH - 1)
    assert coming.came == 0
    outputs_are_of(OTHER, service)


def test_nothing_that_is_not_finite_is_served(service: RolloutService) -> None:
    """Row 30. In the last part: an engine that loads part by part says that it is torn, one that collects keeps all."""
    tensors = tensors_of(OTHER)
    *_, last = tensors
    with pytest.raises(WeightError, match="NaN or infinity"):
        service.receive_policy(1, Coming(tensors | {last: tensors[last] * torch.nan}), EPOCH)
    assert service.open_epoch(EPOCH).policy in (0, TORN)
    assert service.load_policy(2, tensors_of(OTHER), EPOCH) == ServedVersions(2, 0)
    outputs_are_of(OTHER, service)


@pytest.mark.parametrize("part", [0, 2])
def test_a_transfer_that_breaks_off_leaves_no_version_that_is_not_told(service: RolloutService, part: int) -> None:
    coming = Coming(tensors_of(OTHER), break_at=part)
    with pytest.raises(TransferError):
        service.receive_policy(1, coming, EPOCH)
    assert coming.closed == 1
    versions = service.open_epoch(EPOCH)
    if versions.policy == TORN:
        assert part > 0 and isinstance(service._engine, SGLangEngine)
    else:
        assert versions == ServedVersions(0, 0)
        outputs_are_of(MODEL, service)
    copy = tensors_of(OTHER)  # through the object store
    assert service.load_policy(1, copy, EPOCH) == ServedVersions(1, 0)
    outputs_are_of(OTHER, service)
