"""Hidden states through the rollout server over the fake engine, against those of the model's own forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from services.core.errors import BatchError, ConfigError, RequestError, ServiceLostError
from services.core.types import GroupWork, HiddenStateChunk, Rollout, SamplingParams
from services.models.capture import target_states
from services.models.hidden import HiddenStates
from services.rollout.service import RolloutService
from services.rollout.sglang.engine import SGLangEngine
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.models.tiny import tensors_of
from tests.services.rollout.engines import group, letters, make_engine, strategy, ticking
from tests.services.rollout.sglang.fake import FakeHandle, limits_of
from tests.services.rollout.sglang.serving import (
    ARGMAX,
    CHAIN,
    DRAFTER,
    EPOCH,
    MODEL,
    OTHER,
    PROMPT,
    STRATEGIES,
    drain,
    served,
)

EAGLES = [CHAIN, ARGMAX, STRATEGIES[3], strategy("eagle", 1)]
ROOM = 2**22
SAMPLED = SamplingParams(temperature=1.0, max_tokens=11)


def kept(*prompts: tuple[int, ...], count: int = 3, sampling: SamplingParams = SAMPLED) -> list[GroupWork]:
    works = [group(ids, count, sampling, first_seed=31 * n, name=f"g{n}") for n, ids in enumerate(prompts)]
    return [GroupWork(w.group_id, w.prompt, w.indices, w.seeds, w.sampling, keep_states=True) for w in works]


def check_states(found: Sequence[HiddenStates], rollouts: Sequence[Rollout], model: PreTrainedModel) -> None:
    """One for each rollout, of all tokens but perhaps the last, with the trainer's own states."""
    left = [((*r.prompt_ids, *r.response_ids), len(r.prompt_ids)) for r in rollouts]
    for s in found:
        ids = tuple(s.input_ids.tolist())
        whole, prompt = next(k for k in left if k[0][: len(ids)] == ids and len(ids) >= len(k[0]) - 1)
        left.remove((whole, prompt))
        assert s.loss_mask.tolist() == [n >= prompt for n in range(len(ids))]
        with torch.no_grad():
            wanted, _ = target_states(model.base_model, (), input_ids=torch.tensor([ids]))
        assert torch.allclose(s.hidden, wanted[0], atol=1e-5)
    assert not left


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("s", EAGLES, ids=lambda s: s.name)
def test_states_are_the_trainers(s: DraftStrategy, rounds: int) -> None:
    service, _ = served(s, capture_bytes=ROOM, rounds=rounds)
    found = drain(service, kept(PROMPT, (1, 7, 9, 4, 2, 8), (3, 3)))
    chunk, states = service.take_states(6, EPOCH)
    check_states(states, list(found.values()), MODEL)
    tokens = sum(len(h.input_ids) for h in states)
    assert chunk == HiddenStateChunk(0, 6, 9, tokens, tokens * (8 + 1 + 4 * 32)), "nothing missing, nothing lost"
    assert service.take_states(7, EPOCH) == (HiddenStateChunk(0, 7, 0, 0, 0), []), "taken once"


def test_a_stop_string_cuts_the_states_with_the_response() -> None:
    service, _ = served(CHAIN, capture_bytes=ROOM, rounds=4)
    sampling = SamplingParams(temperature=1.0, max_tokens=30, stop_strings=tuple(letters([n]) for n in range(6)))
    found = drain(service, kept(PROMPT, (5, 6), count=4, sampling=sampling))
    chunk, states = service.take_states(1, EPOCH)
    assert chunk.num_missing == 0
    # in a response of one token the next forward pass, if there was one, went beyond the stop
    check_states(states, [r for r in found.values() if len(r.response_ids) > 1 or _has(states, r)], MODEL)


def _has(states: Sequence[HiddenStates], r: Rollout) -> bool:
    ids = (*r.prompt_ids, *r.response_ids)
    return any(tuple(s.input_ids.tolist()) == ids for s in states)


def test_a_policy_loaded_mid_response_replaces_all_states() -> None:
    """No sequence mixes versions; one that ended before the load is of an old policy, and left out."""
    service, _ = served(CHAIN, capture_bytes=ROOM)
    works = kept(PROMPT, (2, 2), sampling=SamplingParams(temperature=1.0, max_tokens=24))
    (short,) = kept((9, 9), count=1, sampling=SamplingParams(temperature=1.0, max_tokens=2))
    service.submit([*works, GroupWork("short", short.prompt, (0,), (1,), short.sampling, True)], EPOCH)
    early = [r for _ in range(4) for r in service.advance(0.0, EPOCH).finished]
    assert [r.group_id for r in early] == ["short"]
    service.load_policy(1, tensors_of(OTHER), EPOCH)
    found = drain(service)
    assert all(r.policy_versions == (0, 1) for r in found.values())
    chunk, states = service.take_states(1, EPOCH)
    check_states(states, list(found.values()), OTHER)
    assert (chunk.policy_version, chunk.num_sequences, chunk.num_missing) == (1, 6, 1)
    assert {s.policy_version for s in states} == {1}


def test_work_that_does_not_ask_keeps_nothing_and_lends_no_prefix() -> None:
    service, handle = served(CHAIN, capture_bytes=ROOM)
    drain(service, [group(PROMPT, 3, SAMPLED)])
    wanted = drain(service, kept(PROMPT))
    chunk, states = service.take_states(1, EPOCH)
    check_states(states, list(wanted.values()), MODEL)
    again = drain(service, kept(PROMPT))
    assert chunk.num_missing == 0 and handle.takes == 1
    chunk, states = service.take_states(2, EPOCH)
    assert chunk.num_missing == 0, "a prefix of the window before was found"
    check_states(states, list(again.values()), MODEL)


def test_requests_that_were_dropped_leave_no_prefix_behind() -> None:
    service, _ = served(CHAIN, capture_bytes=ROOM)
    service.submit(kept(PROMPT), EPOCH)
    service.advance(0.0, EPOCH)
    service.open_epoch(EPOCH + 1)
    found = drain(service, kept(PROMPT), EPOCH + 1)
    chunk, states = service.take_states(1, EPOCH + 1)
    assert chunk.num_missing == 0
    check_states(states, list(found.values()), MODEL)


def test_a_small_buffer_is_told_and_what_fits_is_right() -> None:
    service, _ = served(CHAIN, capture_bytes=9_000)
    found = drain(service, kept(PROMPT, (4, 4)))
    chunk, states = service.take_states(1, EPOCH)
    assert chunk.num_missing > 0 and chunk.lost_bytes > 0 and chunk.num_sequences == len(states) > 0
    ids = [(*r.prompt_ids, *r.response_ids) for r in found.values()]
    for s in states:
        cut = tuple(s.input_ids.tolist())
        assert any(whole[: len(cut)] == cut for whole in ids)
        with torch.no_grad():
            wanted, _ = target_states(MODEL.base_model, (), input_ids=s.input_ids[None])
        assert torch.allclose(s.hidden, wanted[0], atol=1e-5)
    drain(service, kept((5, 5), count=1))
    assert service.take_states(2, EPOCH)[0].num_missing == 0


def test_shifted_states_are_an_error() -> None:
    service, handle = served(CHAIN, capture_bytes=ROOM)
    handle.faults.shift_states = True
    drain(service, kept(PROMPT))
    with pytest.raises(BatchError, match="hidden states of SGLang of the tests belong to other tokens"):
        service.take_states(1, EPOCH)


def test_engines_that_keep_nothing_say_so() -> None:
    service, _ = served(CHAIN)
    with pytest.raises(RequestError, match=r"keeps no hidden states: set drafter\.states: engine"):
        service.submit(kept(PROMPT), EPOCH)
    with pytest.raises(ConfigError, match=r"keeps no hidden states: set drafter\.states: engine"):
        service.take_states(1, EPOCH)
    with pytest.raises(ConfigError, match="only an engine with an EAGLE drafter"):
        served(OFF, capture_bytes=ROOM)
    native = RolloutService(make_engine(MODEL), {OFF.name: OFF}, ticking())
    native.open_epoch(EPOCH)
    with pytest.raises(RequestError, match=r"this engine keeps no hidden states: set drafter\.states: engine"):
        native.submit(kept(PROMPT), EPOCH)
    with pytest.raises(ConfigError, match=r"this engine keeps no hidden states: set drafter\.states: engine"):
        native.take_states(1, EPOCH)


def test_a_lost_engine_is_a_lost_service() -> None:
    service, handle = served(CHAIN, capture_bytes=ROOM)
    drain(service, kept(PROMPT))
    handle.faults.dead = True
    with pytest.raises(ServiceLostError):
        service.take_states(1, EPOCH)


def test_states_are_kept_only_where_memory_was_set_aside() -> None:
    handle = FakeHandle(MODEL, CHAIN)
    engine = SGLangEngine(handle, limits_of(MODEL, CHAIN, capture_bytes=ROOM), {3: CHAIN}, letters, ticking())
    assert handle._capture is not None
    engine.load_policy(0, tensors_of(MODEL))
    engine.load_drafter(0, DRAFTER)
    handle.capture_states(0)
    assert handle._capture is None
