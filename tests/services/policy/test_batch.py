from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.policy import PolicyConfig
from services.core.errors import BatchError
from services.core.types import FinishReason, TrainBatch
from services.policy.batch import AdmittedBatch, admit, split_updates

VOCAB = 24


def batch(*rollouts, advantages=None) -> TrainBatch:
    return TrainBatch(0, rollouts, tuple(advantages or [1.0] * len(rollouts)))


def spoil(rollout, **fields):
    """A record as a broken engine would send it past the constructor's assertion."""
    for name, value in fields.items():
        object.__setattr__(rollout, name, value)
    return rollout


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_ids": ()}, "no prompt or response token ids"),
        ({"response_ids": (), "rollout_logprobs": ()}, "no prompt or response token ids"),
        ({"prompt_ids": ()}, "no prompt or response token ids"),
        ({"response_ids": (5, 3, 16, 3, 2)}, "5 response ids but 6 logprobs"),  # decoded and tokenised again
        ({"rollout_logprobs": (-1.0,)}, "6 response ids but 1 logprobs"),
        ({"rollout_logprobs": ()}, "6 response ids but 0 logprobs"),
        ({"response_ids": (1, 2, 3, 4, 5, VOCAB)}, "outside 0..23"),
        ({"response_ids": (1, 2, 3, 4, 5, -1)}, "outside 0..23"),
        ({"prompt_ids": (VOCAB + 3,)}, "outside 0..23"),
        ({"logprob_convention": "raw"}, "convention 'raw'"),
    ],
)
def test_token_in_token_out(make_rollout, fields, message) -> None:
    """Rows 49 and 53: ids as sampled, one logprob each, in a known convention, or nothing at all."""
    with pytest.raises(BatchError, match=message):
        admit(batch(make_rollout(0), spoil(make_rollout(1), **fields)), VOCAB, PolicyConfig())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_advantage_is_refused(make_rollout, bad) -> None:
    with pytest.raises(BatchError, match="NaN reward"):
        admit(batch(make_rollout(0), advantages=[bad]), VOCAB, PolicyConfig())


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_non_finite_logprobs_drop_the_rollout_and_are_counted(make_rollout, bad) -> None:
    spoiled = make_rollout(1, rollout_logprobs=(-1.0, -1.0, bad, -1.0, -1.0, -1.0))
    found = admit(batch(make_rollout(0), spoiled, make_rollout(2)), VOCAB, PolicyConfig())
    assert [r.index for r in found.rollouts] == [0, 2]
    assert found.warnings == ("dropped 1 of 3 rollouts: rollout_logprobs not finite",)


def test_finish_reason_decides_not_the_last_id(make_rollout) -> None:
    """Row 52: the last id says nothing, models end with several stop ids; an aborted rollout may hold no token."""
    eos_at_end = {"response_ids": (7, 8, 2)}
    stopped = make_rollout(0, response_ids=(7, 8, 9), finish_reason=FinishReason.STOP)
    cut = make_rollout(1, finish_reason=FinishReason.LENGTH, **eos_at_end)
    aborted = make_rollout(2, finish_reason=FinishReason.ABORT, **eos_at_end)
    empty = make_rollout(3, finish_reason=FinishReason.ABORT, response_ids=())
    found = admit(batch(stopped, cut, aborted, empty), VOCAB, PolicyConfig())
    assert [r.index for r in found.rollouts] == [0, 1]
    assert found.trained == (True, True)
    assert found.warnings == ("dropped 2 of 4 rollouts: aborted before their end",)


@pytest.mark.parametrize(("mode", "trained"), [("skip", (False, False, True, True)), ("keep", (True,) * 4)])
def test_zero_variance_groups(make_rollout, mode, trained) -> None:
    """Row 42. A rollout that happens to sit at its group's mean is no zero-variance group."""
    rollouts = [make_rollout(i, group=g) for g in ("flat", "live") for i in range(2)]
    found = admit(batch(*rollouts, advantages=[0.0, 0.0, 0.0, 1.0]), VOCAB, PolicyConfig(zero_variance=mode))
    assert found.trained == trained
    assert found.zero_variance_fraction == 0.5


def test_empty_batch() -> None:
    found = admit(batch(), VOCAB, PolicyConfig())
    assert found.rollouts == () and found.zero_variance_fraction == 0.0


def test_responses_that_were_cut_off_may_stay_out_of_the_loss(make_rollout) -> None:
    """Rows 45 and 52: by the finish reason, also when the last token looks like an end."""
    rollouts = [make_rollout(i, finish_reason=FinishReason.LENGTH if i % 2 else FinishReason.STOP) for i in range(4)]
    values = [1.0, -1.0, 0.5, -0.5]
    assert admit(batch(*rollouts, advantages=values), VOCAB, PolicyConfig()).trained == (True,) * 4
    found = admit(batch(*rollouts, advantages=values), VOCAB, PolicyConfig(truncated="mask"))
    assert found.trained == (True, False, True, False) and found.warnings == () and len(found.rollouts) == 4
    cut = [make_rollout(i, finish_reason=FinishReason.LENGTH) for i in range(2)]
    found = admit(batch(*cut, advantages=[1.0, -1.0]), VOCAB, PolicyConfig(truncated="mask"))
    assert not any(found.trained) and "cut off by max_tokens" in found.warnings[0]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30), st.booleans()), max_size=12), st.integers(1, 5))
def test_updates_share_out_whole_groups(groups: list[tuple[int, int, bool]], updates: int) -> None:
    from types import SimpleNamespace as Some

    rollouts = tuple(
        Some(group_id=g, response_ids=(1,) * n) for g, (size, n, _) in enumerate(groups) for _ in range(size)
    )
    trained = tuple(t for size, _, t in groups for _ in range(size))
    parts = split_updates(AdmittedBatch(rollouts, (0.0,) * len(rollouts), trained, 0.0, ()), updates)  # type: ignore[arg-type]
    assert [i for part in parts for i in part] == [i for i, t in enumerate(trained) if t]
    assert len(parts) <= updates and all(parts)
    owners = [{rollouts[i].group_id for i in part} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners)), "no group in two parts"
    if updates == 1:
        assert len(parts) == any(trained)
