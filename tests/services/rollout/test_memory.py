"""The native engine's keys and values, lent out and taken back."""

from __future__ import annotations

import pytest
import torch

from services.core.errors import RequestError, StaleEpochError
from services.core.types import SamplingParams
from services.rollout.service import RolloutService
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import CHAINS, finish, group, make_engine, prompts, ticking

MODEL = tiny_model("qwen3", 32, 0, 2.0)
DRAFTER = random_drafter(spec_of(MODEL))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20)
EPOCH = 4


@pytest.mark.parametrize("strategy", [OFF, CHAINS[2]], ids=lambda s: s.name)
def test_rollouts_after_a_turn_of_somebody_else_are_those_without_one(strategy: DraftStrategy) -> None:
    works = [group(ids, 2, SAMPLED) for ids in prompts(32, 3)]
    calm, lending = (make_engine(MODEL, strategy, DRAFTER) for _ in range(2))
    for engine in (calm, lending):
        finish(engine, [group(ids, 2, SAMPLED) for ids in prompts(32, 3, seed=9)])
    stores = [*lending._rows.kv.layers, *lending._rows.draft_kv.layers]
    for store in stores:
        store.fill_(torch.nan)  # what the memory may hold when it comes back
    released = lending.switch_memory(True)
    assert lending.released and all(not store.untyped_storage().nbytes() for store in stores)
    assert lending.switch_memory(False) == released == sum(store.nbytes for store in stores)
    assert not lending.released
    expected, found = finish(calm, works), finish(lending, works)
    assert {k: (r.response_ids, r.rollout_logprobs) for k, r in found.items()} == {
        k: (r.response_ids, r.rollout_logprobs) for k, r in expected.items()
    }


def test_the_server_lends_what_is_not_in_use_and_tells_it_once() -> None:
    service = RolloutService(make_engine(MODEL, OFF, load=False), {}, ticking())
    service.open_epoch(EPOCH)
    assert service.switch_memory(False, EPOCH) is None, "it has its memory"
    released = service.switch_memory(True, EPOCH)
    assert released is not None and released.released and released.seconds > 0 and released.num_bytes > 0
    assert service.switch_memory(True, EPOCH) is None, "a message that comes twice changes nothing"
    with pytest.raises(RequestError, match="memory is released: resume it first"):
        service.submit([group((1, 2, 3))], EPOCH)
    service.load_policy(0, tensors_of(MODEL), EPOCH)
    with pytest.raises(StaleEpochError):
        service.switch_memory(False, EPOCH - 1)
    service.open_epoch(EPOCH + 1)
    resumed = service.switch_memory(False, EPOCH + 1)
    assert resumed is not None and not resumed.released
    service.submit([group((1, 2, 3))], EPOCH + 1)
    with pytest.raises(RequestError, match="1 requests run: release the memory when all have ended"):
        service.switch_memory(True, EPOCH + 1)
    switches = [s for _ in range(50) for s in service.advance(0.0, EPOCH + 1).memory_switches]
    assert switches == [released, resumed]
