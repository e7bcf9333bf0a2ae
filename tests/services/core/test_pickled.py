"""Records cross processes as they are, and what their constructors refuse does not come across."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.core.errors import LongtailError
from services.core.pickled import pickled_by_call
from services.core.types import (
    AcceptanceStats,
    FinishReason,
    GroupWork,
    PartialRollout,
    Prompt,
    Reward,
    Rollout,
    RunningRequest,
    SamplingParams,
    ServedVersions,
    ServerReport,
    StrategySpan,
)

SAMPLING = SamplingParams(temperature=0.7, max_tokens=9)
STATS = AcceptanceStats((3, 1), 4, {"off": 2}, {"eagle": 1})
PROMPT = Prompt("p", "text", (1, 2), "answer", "task", {"deep": [1, {"er": 2.5}]})
PARTIAL = PartialRollout("g", 1, (4, 5), (-0.5, -1.0), (3,), (), STATS, 1.5)
ROLLOUT = Rollout(
    "g", "p", 0, 1, (1, 2), (3,), (-0.25,), "x", FinishReason.STOP, SAMPLING, (1,), (2,), STATS, "rollout-3", 1.0, 2.0
)
SPAN = StrategySpan(-1.0, 0.0, "off", "why", 10, 1.0, 20, 20, 2, 2, None, 0.5)
REPORT = ServerReport(
    (ROLLOUT,), (RunningRequest("g#1", 2, STATS),), 1, 5, 0.5, "off", ServedVersions(1, None), spans=(SPAN,)
)
RECORDS = [
    SAMPLING, STATS, PROMPT, PARTIAL, ROLLOUT, SPAN, REPORT, Reward(1.0, True, "ok"), ServedVersions(None, 3),
    GroupWork("g", PROMPT, (0, 1), (7, 8), SAMPLING, partials=(PARTIAL,)),
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_record_comes_across_whole_and_as_a_call(record: Any) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(record, protocol))
        assert type(back) is type(record) and back == record
    assert copy.copy(record) == copy.deepcopy(record) == record
    assert record.__reduce__()[0] is type(record)


def test_what_a_constructor_refuses_does_not_come_across() -> None:
    message = pickle.dumps(ROLLOUT)
    assert pickle.loads(message) == ROLLOUT
    object.__setattr__(ROLLOUT_COPY := copy.copy(ROLLOUT), "rollout_logprobs", (-0.5, -0.5))
    with pytest.raises((AssertionError, LongtailError)):
        pickle.loads(pickle.dumps(ROLLOUT_COPY))


def test_a_class_that_cannot_be_called_with_its_fields_is_refused() -> None:
    @dataclass
    class Half:
        given: int
        made: int = field(default=0, init=False)

    @dataclass
    class Single:
        one: int

    for kind in (Half, Single):
        with pytest.raises(AssertionError):
            pickled_by_call(kind)
