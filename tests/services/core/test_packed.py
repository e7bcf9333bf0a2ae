"""Packed numbers are the numbers given, in few bytes, and nothing but numbers."""

from __future__ import annotations

import math
import operator
import pickle
import random
from dataclasses import replace

import pytest
import torch

from services.core.control import refuse_tensors
from services.core.errors import ControlMessageError
from services.core.packed import packed_ids, packed_logprobs
from services.core.types import AcceptanceStats, FinishReason, Rollout, SamplingParams


def test_packed_numbers_are_those_given_bit_by_bit() -> None:
    rng = random.Random(0)
    ids = tuple(rng.randrange(-(2**31), 2**31) for _ in range(500))
    logprobs = (*(-rng.expovariate(1.0) for _ in range(500)), 0.0, -math.inf, 5e-324)
    assert tuple(packed_ids(ids)) == ids
    assert tuple(packed_logprobs(logprobs)) == logprobs
    assert math.isnan(packed_logprobs([math.nan])[0])


def test_packed_is_a_sequence_and_equal_to_its_tuple() -> None:
    packed = packed_ids([7, 8, 9])
    assert packed == (7, 8, 9)
    assert operator.eq((7, 8, 9), packed)  # the tuple is asked first
    assert packed != (7, 8)
    assert packed != [7, 8, 9]  # as a tuple is not
    assert (len(packed), packed[0], packed[-1], packed[1:], packed[:0]) == (3, 7, 9, (8, 9), ())
    assert 8 in packed and 5 not in packed
    assert repr(packed) == "(7, 8, 9)"
    assert hash(packed) == hash((7, 8, 9))
    assert not packed_ids(())
    with pytest.raises(IndexError):
        packed[3]


def test_ids_are_integers_of_32_bits() -> None:
    with pytest.raises(OverflowError):
        packed_ids([2**31])
    with pytest.raises(TypeError):
        packed_ids([1.5])  # type: ignore[list-item]
    assert packed_logprobs(packed_ids([1])) == (1.0,)
    with pytest.raises(TypeError):
        packed_ids(packed_logprobs([1.0]))  # type: ignore[arg-type]


def test_a_pickled_response_takes_twelve_bytes_a_token() -> None:
    short, long = (len(pickle.dumps(rollout(n), 5)) for n in (1000, 3000))
    assert (long - short) / 2000 == pytest.approx(12, abs=0.1)
    assert pickle.loads(pickle.dumps(rollout(1000), 5)) == rollout(1000)


def test_packing_again_copies_nothing() -> None:
    packed = packed_ids([1, 2])
    assert packed_ids(packed) is packed


def test_a_range_is_kept_as_it_is() -> None:
    """What a simulation gives for ids that nobody reads takes neither time nor memory."""
    response = replace(rollout(2), response_ids=range(10**9), rollout_logprobs=range(10**9))
    assert response.response_ids == range(10**9)
    assert response.rollout_logprobs == range(10**9)


def test_a_tensor_given_as_ids_is_numbers_afterwards() -> None:
    packed = packed_ids(torch.tensor([3, 4]))
    assert packed == (3, 4)
    assert [type(i) for i in packed] == [int, int]


def test_the_guard_lets_a_packed_response_pass_and_still_sees_what_is_beside_it() -> None:
    response = rollout(10)
    refuse_tensors(response, "answer")
    with pytest.raises(ControlMessageError, match=r"answer\.text holds a builtins\.bytes"):
        refuse_tensors(replace(response, text=b"raw"), "answer")  # type: ignore[arg-type]


def rollout(tokens: int) -> Rollout:
    return Rollout(
        group_id="g",
        prompt_id="p",
        index=0,
        seed=1,
        prompt_ids=(1, 2),
        response_ids=list(range(tokens)),
        rollout_logprobs=[-0.5 - i for i in range(tokens)],
        text="x",
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(),
        policy_versions=(1,),
        drafter_versions=(),
        acceptance=AcceptanceStats((), 0, {}),
    )
