from __future__ import annotations

from typing import Any

import pytest

from deploy.remarks import remarks
from tests.services.coordinator.world import tiny_config

BESIDE: dict[str, Any] = {"training": {"beside_policy": True}}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, None),
        ({"rollout": {"num_servers": 1}}, "beside_policy: true"),
        ({"rollout": {"num_servers": 1}, "placement": {"policy": "colocated"}}, "take more servers"),
        ({"rollout": {"num_servers": 1}, "drafter": BESIDE}, None),
        ({"rollout": {"num_servers": 1}, "drafter": {"training": {"when": "never"}}}, None),
        ({"rollout": {"num_servers": 1}, "speculation": {"selector": {"type": "fixed"}}}, None),
    ],
)
def test_a_drafter_that_nobody_ever_trains_is_said(changes: dict[str, Any], remedy: str | None) -> None:
    said = list(remarks(tiny_config(**changes)))
    assert len(said) == (remedy is not None)
    assert remedy is None or (remedy in said[0] and "never trained" in said[0])
