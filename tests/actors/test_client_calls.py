"""The clients over Ray have every call of the protocols: a missing one would show in the middle of a run only."""

from __future__ import annotations

import pytest

from actors.clients import RayDrafterClient, RayPolicyClient, RayRewardClient, RayRolloutClient
from deploy.inprocess import LocalDrafterClient, LocalPolicyClient, LocalRewardClient, LocalRolloutClient
from services.core.protocols import DrafterClient, PolicyClient, RewardClient, RolloutClient


@pytest.mark.parametrize(
    ("protocol", "clients"),
    [
        (RolloutClient, (RayRolloutClient, LocalRolloutClient)),
        (DrafterClient, (RayDrafterClient, LocalDrafterClient)),
        (PolicyClient, (RayPolicyClient, LocalPolicyClient)),
        (RewardClient, (RayRewardClient, LocalRewardClient)),
    ],
)
def test_every_call_is_there(protocol: type, clients: tuple[type, ...]) -> None:
    calls = {name for name in vars(protocol) if not name.startswith("_") and name != "name"}
    assert calls
    for client in clients:
        assert calls <= set(dir(client)), f"{client.__name__} lacks {calls - set(dir(client))}"
