"""Hidden states that the native engine keeps: those of the target over the whole sequence, whatever drafted it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.core.errors import ConfigError, RequestError
from services.core.types import SamplingParams
from services.models.capture import target_states
from services.rollout.kept import KeptStates
from services.rollout.native import NativeEngine
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import CHAINS, EVERY, Switching, finish, group, make_engine

MODEL, OTHER = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
ROOM = 2**20
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24)


def keeping(ids: tuple[int, ...], count: int = 3, seed: int = 0):
    return replace(group(ids, count, SAMPLED, seed), keep_states=True)


def engine(room: int = ROOM, selector=None) -> NativeEngine:
    chosen = selector or Switching(EVERY, seed=3)
    made = make_engine(MODEL, chosen, random_drafter(spec_of(MODEL)), capture_bytes=room)
    return made


def check(states, model) -> None:
    with torch.no_grad():
        wanted, _ = target_states(model.base_model, (), input_ids=states.input_ids[None])
    assert torch.allclose(states.hidden, wanted[0], atol=1e-4)


def test_they_are_the_targets_own_whatever_drafted_and_however_rows_moved() -> None:
    made = engine()
    found = finish(made, [keeping((1, 2, 3)), keeping((4, 5, 6, 7), 4, 9), group((8, 9), 2, SAMPLED)])
    chunk, kept = made.take_states(5)
    assert (chunk.step, chunk.policy_version, chunk.num_sequences, chunk.num_missing) == (5, 0, 7, 0)
    assert chunk.num_tokens == sum(len(s.input_ids) for s in kept)
    whole = {(*r.prompt_ids, *r.response_ids): len(r.prompt_ids) for r in found.values()}
    seen = set()
    for s in kept:
        (ids,) = (w for w in whole if w[:-1] == tuple(s.input_ids.tolist()) and w not in seen)
        seen.add(ids)
        assert s.loss_mask.tolist() == [n >= whole[ids] for n in range(len(ids) - 1)]
        check(s, MODEL)
    assert made.take_states(6)[1] == [], "taken once"


def test_dropping_what_runs_leaves_the_states_of_what_ended() -> None:
    """A slot's next epoch begins with a drop, and its server is asked for the states only then."""
    made = engine()
    finish(made, [keeping((1, 2, 3))])
    made.submit([keeping((4, 5, 6), 2, 9)])
    made.step()
    assert made.abort() and made.take_states(0)[0].num_sequences == 3


def test_a_load_in_the_middle_leaves_states_of_the_new_policy_alone() -> None:
    made = engine()
    made.submit([keeping((1, 2, 3), 2)])
    for _ in range(3):
        made.step()
    assert made.num_running == 2
    made.load_policy(7, tensors_of(OTHER))
    finish(made)
    chunk, kept = made.take_states(0)
    assert chunk.policy_version == 7 and {s.policy_version for s in kept} == {7}
    for s in kept:
        check(s, OTHER)


def test_states_of_two_policies_are_one_chunk_of_the_newer() -> None:
    made = engine()
    finish(made, [keeping((1, 2, 3), 2)])
    made.load_policy(1, tensors_of(OTHER))
    finish(made, [keeping((4, 5, 6), 3)])
    chunk, kept = made.take_states(0)
    assert len(kept) == 3 and chunk.num_missing == 2
    for s in kept:
        check(s, OTHER)


def test_the_oldest_make_way_and_that_is_counted() -> None:
    kept = KeptStates(4 * (8 + 4 * 6 + 1) * 3)
    for n in range(5):
        kept.keep([n, 1, 2, 3, 4], torch.full((4, 6), float(n)), 1, 0)
    chunk, states = kept.take(0, 0)
    assert [int(s.input_ids[0]) for s in states] == [2, 3, 4]
    assert (chunk.num_missing, chunk.lost_bytes) == (2, 2 * states[0].num_bytes)
    assert kept.take(1, 9)[0].policy_version == 9, "nothing is missing any more"


def test_what_is_kept_is_a_copy() -> None:
    kept, hidden = KeptStates(ROOM), torch.ones(3, 2)
    kept.keep([1, 2, 3, 4], hidden, 1, 0)
    hidden.zero_()
    assert kept.take(0, 0)[1][0].hidden.eq(1).all()


def test_an_engine_without_room_says_so() -> None:
    made = engine(0, CHAINS[0])
    with pytest.raises(RequestError, match=r"set drafter\.states: engine"):
        made.submit([keeping((1, 2))])
    with pytest.raises(ConfigError, match=r"set drafter\.states: engine"):
        made.take_states(0)
