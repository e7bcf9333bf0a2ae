"""Surprise: whether responses were drawn from the policy, whatever is told of their log probabilities."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.config.policy import PolicyConfig
from services.core.types import PolicyStepReport, Rollout, SamplingParams, TrainBatch
from services.policy.trainer import PolicyTrainer
from tests.services.policy.plain import one_by_one


def _report(model, rollouts) -> PolicyStepReport:
    advantages = tuple(1.0 if i % 2 else -1.0 for i in range(len(rollouts)))
    trainer = PolicyTrainer(model, PolicyConfig(), lambda: 0.0)
    return trainer.train_step(TrainBatch(3, tuple(rollouts), advantages)).report


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)])
def test_surprise_tells_responses_of_the_policy_from_others(make_model, sample_rollout, sampling) -> None:
    """Logprobs are right in all three: what an engine says of a token does not tell who chose it."""
    model = make_model()
    drawn = [sample_rollout(model, i, 4, 60, "g", sampling) for i in range(8)]
    own = _report(model, drawn)
    assert abs(own.surprise_errors) < 4 and not any("surprise" in w for w in own.warnings)
    likeliest = [sample_rollout(model, i, 4, 60, "g", SamplingParams(temperature=0.2)) for i in range(8)]
    at_random = [] if sampling.top_p < 1 else [([_with_every_fifth_token_at_random(r) for r in drawn], 1)]
    for others, sign in ((likeliest, -1), *at_random):
        report = _report(model, [_scored(model, r, sampling) for r in others])
        assert sign * report.surprise_errors > 6 and report.logprob_gap < 1e-3
        assert sum("not drawn from the policy" in w for w in report.warnings) == 1


def _with_every_fifth_token_at_random(rollout: Rollout) -> Rollout:
    rng = random.Random(rollout.rollout_id)
    ids = (rng.randrange(24) if n % 5 == 0 else token for n, token in enumerate(rollout.response_ids))
    return replace(rollout, response_ids=tuple(ids))


def _scored(model, rollout: Rollout, sampling: SamplingParams) -> Rollout:
    """As an engine with `sampling` would tell of these tokens."""
    sampled = replace(rollout, sampling=sampling)
    return replace(sampled, rollout_logprobs=tuple(one_by_one(model, sampled)[0].tolist()))
