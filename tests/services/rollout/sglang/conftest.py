"""A handle on a stand-in for a running SGLang engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.models.eagle import Eagle
from services.models.target import target_names
from services.rollout.sglang.launch import SGLangHandle
from tests.services.models.tiny import spec_of
from tests.services.rollout.sglang.fused import FusedModel
from tests.services.rollout.sglang.manager import MODEL, Engine
from tests.services.rollout.sglang.standins import install


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    install(monkeypatch)
    spec = spec_of(MODEL)
    eagle = Eagle(spec)
    draft = FusedModel(eagle.names() | eagle.engine_zeros(), "model.")
    return Engine({"policy": FusedModel(target_names(spec)), "drafter": draft})


@pytest.fixture
def handle(engine: Engine) -> Iterator[SGLangHandle]:
    made = SGLangHandle(engine, "rollout-3", 1, False, 60.0, device="cpu")
    yield made
    made.close()


@pytest.fixture
def hasty(engine: Engine) -> Iterator[SGLangHandle]:
    """Its calls time out at once."""
    made = SGLangHandle(engine, "rollout-3", 1, False, 0.2, device="cpu")
    yield made
    made.close()
