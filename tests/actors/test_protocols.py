"""Every client has what the coordinator's protocols ask for. A merge once moved methods into the function before them,
where nothing but a run would have missed them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from actors import clients
from deploy import inprocess
from services.core import protocols

PAIRS = [
    (getattr(module, f"{prefix}{kind}Client"), getattr(protocols, f"{kind}Client"))
    for module, prefix in ((clients, "Ray"), (inprocess, "Local"))
    for kind in ("Rollout", "Drafter", "Policy", "Reward")
]


@pytest.mark.parametrize(("client", "protocol"), PAIRS, ids=lambda c: c.__name__)
def test_no_method_is_missing_or_takes_other_arguments(client: Any, protocol: Any) -> None:
    for name, asked in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(asked):
            continue
        own = getattr(client, name, None)
        assert own is not None, f"{client.__name__} lacks {name}"
        assert list(inspect.signature(own).parameters) == list(inspect.signature(asked).parameters), name
