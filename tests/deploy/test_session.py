from __future__ import annotations

import pytest

from deploy.processes import descendants
from deploy.session import ray_session
from services.core.errors import ConfigError
from tests.services.coordinator.world import tiny_config


def test_an_object_store_that_the_machine_cannot_hold_is_refused_before_anything_starts() -> None:
    before = descendants()
    config = tiny_config(placement={"object_store_bytes": 10**16})
    with (
        pytest.raises(ConfigError, match=r"object_store_bytes 10000000000000000 is more than .* lower it"),
        ray_session(config),
    ):
        pass
    assert descendants() == before
