from __future__ import annotations

import pytest

from services.coordinator.scoring import check_errors
from services.core.errors import RewardError
from services.core.types import Prompt, Reward, Rollout
from tests.services.coordinator.fakes import FakeReward
from tests.services.coordinator.world import World, tiny_config


def rewards(*errors: str | None) -> list[Reward]:
    return [Reward(0.0, False, e) for e in errors]


def test_up_to_the_fraction_it_is_borne() -> None:
    check_errors([], 0.0)
    check_errors(rewards(None, None), 0.0)
    check_errors(rewards("a", None), 0.5)
    check_errors(rewards("a", "b"), 1.0)


def test_beyond_it_the_commonest_cause_is_named() -> None:
    with pytest.raises(RewardError, match=r"^3 of 4 verifications failed, .* 2 times: away; and 1 other causes$"):
        check_errors(rewards("away", "odd", "away", None), 0.5)
    with pytest.raises(RewardError, match=r"1 of 1 .* 1 times: away$"):
        check_errors(rewards("away"), 0.0)


@pytest.mark.parametrize(("allowed", "ends"), [(1.0, "finished"), (0.5, "failed")])
def test_row_54_a_verifier_that_always_fails_ends_the_run_before_anything_is_learned(allowed: float, ends: str) -> None:
    """Counted as zeros, the run would go on for days with a reward of 0."""
    world = World(tiny_config(reward={"max_error_fraction": allowed}, run={"eval_prompts": 0}))

    class Failing(FakeReward):
        def score(self, prompts, rollouts):  # type: ignore[no-untyped-def]
            return rewards(*["ValueError: signal only works in main thread"] * len(rollouts))

    world.reward.instance = Failing()
    if ends == "finished":
        assert world.coordinator.run()["status"] == ends
        return
    with pytest.raises(RewardError, match="signal only works in main thread"):
        world.coordinator.run()
    assert world.observer.summaries[0]["status"] == ends and not world.observer.steps


def test_verifiers_are_sent_texts_and_no_ids() -> None:
    """Ids and log probabilities are nearly all of a rollout's bytes, and would be packed for each group."""
    world = World(tiny_config())
    sent: list[Prompt | Rollout] = []

    class Looking(FakeReward):
        def score(self, prompts, rollouts):  # type: ignore[no-untyped-def]
            sent.extend([*prompts, *rollouts])
            return super().score(prompts, rollouts)

    world.reward.instance = Looking()
    world.coordinator.run()
    prompts, rollouts = ([s for s in sent if isinstance(s, kind)] for kind in (Prompt, Rollout))
    assert prompts and all(p.text and not p.token_ids for p in prompts)
    assert rollouts and all(not (r.prompt_ids or r.response_ids or r.rollout_logprobs) for r in rollouts)
    trained = [r for groups in world.observer.groups.values() for group in groups for r in group.rollouts]
    assert trained and all(r.response_ids for r in trained), "what is trained on has them"
