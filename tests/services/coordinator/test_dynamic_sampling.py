"""Dynamic sampling: against a plain rendering of the rule, in whole runs, and in runs that die or are resumed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.coordinator import Coordinator
from services.coordinator.dynamic_sampling import PromptDraws, StepGroups
from services.coordinator.resume import Takeover
from services.core.types import Group, Prompt, Reward
from tests.services.coordinator.fakes import FakeReward, FakeRollout, make_prompts
from tests.services.coordinator.test_resume import drawn, resumed
from tests.services.coordinator.world import CoordinatorKilled, World, tiny_config

ROUNDS = 3


def config_of(rounds: int = ROUNDS, **sections: Any) -> Any:
    run = {"steps": 4, "eval_prompts": 0, "checkpoint_every": 2, **sections.pop("run", {})}
    sampling = {"max_rounds": rounds} if rounds else None
    return tiny_config(policy={"algorithm": {"type": "dapo", "dynamic_sampling": sampling}}, run=run, **sections)


class Teaching(FakeReward):
    """Only every `every`-th prompt has a group of different rewards; 0: none has."""

    every = 3

    def score(self, prompts: Any, rollouts: Any) -> list[Reward]:
        good = [bool(self.every) and int(p.id[1:]) % self.every == 0 for p in prompts]
        return [Reward(float(g and r.index == 0), False) for g, r in zip(good, rollouts, strict=True)]


def world_of(config: Any, every: int = 3, train_prompts: int = 60) -> World:
    world = World(config, train_prompts)
    world.reward.instance = Teaching()
    world.reward.instance.every = every
    return world


# ---------------------------------------------------------------------------- the rule


def plain_rule(draws: PromptDraws, step: int, signal: Any) -> tuple[list[str], list[str], int]:
    """(sampled, trained on, rounds), prompt ids, as the rule reads."""
    sampled = [p.id for p in draws.of_step(step)]
    rounds = 1
    while rounds < draws.rounds:
        good = [p for p in sampled if signal(p)]
        if len(good) >= draws.per_step:
            break
        missing, wanted = draws.per_step - len(good), draws.per_step
        while good and wanted > 1 and (wanted - 1) * len(good) >= missing * len(sampled):
            wanted -= 1  # fewer would fill the batch, too
        rounds += 1
        known = [p for p in draws.prompts if p.id in sampled]
        more = draws.further(step, rounds, wanted, known)
        if not more:
            rounds -= 1
            break
        sampled += [p.id for p in more]
    good, rest = ([i for i, p in enumerate(sampled) if signal(p) is wanted] for wanted in (True, False))
    return sampled, [sampled[i] for i in sorted((good + rest)[: draws.per_step])], rounds


def group_of(prompt: Prompt) -> Group:
    return Group(prompt, (), ())


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sets(st.integers(0, 29)),
    st.integers(0, 3),
)
def test_the_groups_are_those_of_the_plain_rule(
    sizes: tuple[int, int], rounds: int, step: int, good: set[int], seed: int
) -> None:
    num_prompts, per_step = sizes
    draws = PromptDraws(make_prompts(num_prompts), per_step, seed, rounds)

    def signal(prompt_id: str) -> bool:
        return int(prompt_id[1:]) in good

    groups = StepGroups(draws, step, lambda group: signal(group.prompt.id))
    prompts, count = draws.of_step(step), 0
    while prompts:
        count += len(prompts)
        prompts = groups.add([group_of(p) for p in prompts])
    sampled, trained, used = plain_rule(draws, step, signal)
    assert [g.prompt.id for g in groups.sampled] == sampled and count == len(sampled)
    assert [g.prompt.id for g in groups.chosen()] == trained and len(trained) == per_step
    assert groups.rounds == used <= rounds
    own = {p.id for p in draws.of_step(step)}
    later = sampled[per_step:]
    assert len(set(later)) == len(later) and not own & set(later), "a prompt twice in a step teaches one thing twice"
    full = sum(map(signal, trained)) == per_step
    assert (groups.warning() is None) is (full or rounds == 1)


def test_every_prompt_is_drawn_about_equally_often_in_place_of_others() -> None:
    draws = PromptDraws(make_prompts(20), 4, 0, rounds=2)
    counts = dict.fromkeys([p.id for p in draws.prompts], 0)
    for step in range(1, 101):
        for prompt in draws.further(step, 2, 4, draws.of_step(step)):
            counts[prompt.id] += 1
    assert sum(counts.values()) == 400 and min(counts.values()) >= 10 and max(counts.values()) <= 30


# ---------------------------------------------------------------------------- whole runs


def test_a_step_trains_on_groups_with_a_signal_and_tells_what_it_dropped() -> None:
    world = world_of(config_of(rounds=6))
    summary = world.coordinator.run()
    for metrics, batch in zip(world.observer.steps, world.policy.instance.batches, strict=True):
        groups = world.observer.groups[metrics.step]
        ids = [(r.group_id, r.index) for r in batch.rollouts]
        assert len(batch.rollouts) == 24 and {int(r.prompt_id[1:]) % 3 for r in batch.rollouts} == {0}
        assert ids == sorted(ids) and all(a != 0 for a in batch.advantages)
        assert metrics.sampling_rounds > 1 and metrics.num_groups == len(groups) > 6
        assert metrics.dropped_groups == len(groups) - 6 and metrics.num_rollouts == 4 * len(groups)
        flat = sum(len({r.value for r in g.rewards}) == 1 for g in groups)
        assert metrics.zero_variance_fraction == pytest.approx(flat / len(groups)) and metrics.warnings == ()
        assert metrics.idle_s >= 0 and metrics.rollout_s > 0
    assert summary["rollouts"] == sum(m.num_rollouts for m in world.observer.steps)


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_policy_that_always_fails_ends_its_steps_without_a_signal(rounds: int) -> None:
    """Row 43: bounded, told, and the step is done; row 42: the batch keeps its size."""
    world = world_of(config_of(rounds), every=0)
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["steps"] == 4
    for metrics, batch in zip(world.observer.steps, world.policy.instance.batches, strict=True):
        assert len(batch.rollouts) == 24 and set(batch.advantages) == {0.0}
        assert {r.group_id for r in batch.rollouts} == {f"step{metrics.step:05d}/{i:04d}" for i in range(6)}
        assert (metrics.sampling_rounds, metrics.num_groups) == ((3, 18) if rounds else (1, 6))
        assert metrics.zero_variance_fraction == 1.0
        told = [w for w in metrics.warnings if "dynamic sampling" in w]
        assert told == (["6 of 6 groups have no signal after 3 rounds of dynamic sampling, 18 groups: the prompts are "
                         "too hard or too easy for the policy"] if rounds else [])  # fmt: skip


def test_a_small_prompt_set_ends_the_rounds_early() -> None:
    world = world_of(config_of(rounds=9), every=0, train_prompts=8)
    world.coordinator.run()
    assert {(m.sampling_rounds, m.num_groups) for m in world.observer.steps} == {(2, 8)}


def test_which_groups_are_drawn_does_not_depend_on_timing_or_servers() -> None:
    class Slow(FakeRollout):
        token_s = 0.07

    calm = world_of(config_of())
    calm.coordinator.run()
    rollout = {"num_servers": 3, "group_size": 4, "prompts_per_step": 6, "advance_budget_s": 0.3,
               "engine": {"type": "native", "max_running": 9, "max_len": 1024}}  # fmt: skip
    other = world_of(config_of(rollout=rollout))
    other.servers[1].instance = Slow(1, other.clock, 9, token_s=0.07)
    other.coordinator.run()
    assert drawn(other) == drawn(calm)
    assert [m.num_groups for m in other.observer.steps] == [m.num_groups for m in calm.observer.steps]


def test_a_resumed_run_draws_what_the_uninterrupted_one_did() -> None:
    calm = world_of(config_of())
    calm.coordinator.run()
    world = resumed(calm, 2, train_prompts=60)
    world.reward.instance = Teaching()
    world.coordinator.run()
    assert drawn(world) == drawn(calm)[2:]


def test_a_coordinator_that_dies_between_two_rounds_leaves_nothing_behind() -> None:
    calm = world_of(config_of())
    calm.coordinator.run()
    world = world_of(config_of())
    rounds = []

    def watch(view: Any) -> None:
        if (view.step, view.phase) == (2, "reward"):
            rounds.append(view)
            if len(rounds) == 2:
                raise CoordinatorKilled

    world.observer.watch = watch
    summary = world.run_with_takeovers()
    assert summary["status"] == "finished" and drawn(world) == drawn(calm)
    assert [e.kind for e in world.observer.events].count("coordinator_returned") == 1


def test_with_other_prompts_the_draws_begin_at_their_first() -> None:
    calm = world_of(config_of())
    calm.coordinator.run()
    world = resumed(calm, 2, train_prompts=60)
    world.reward.instance = Teaching()
    world.inputs = type(world.inputs)(make_prompts(60, start=600), world.inputs.heldout, world.inputs.sampling)
    takeover = world.coordinator._takeover
    assert isinstance(takeover, Takeover)
    args = world.config, world.inputs, world.services, world.observer, world.clock
    world.coordinator = Coordinator(*args, takeover)
    world.coordinator.run()
    draws = PromptDraws(world.inputs.train, 6, world.config.run.seed, ROUNDS)
    own = {p.id for p in draws.of_step(1)}
    assert own <= {g.prompt.id for g in world.observer.groups[3]}
