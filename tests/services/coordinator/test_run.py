"""Whole runs on simulated services: the loop's order, drafting in idle slots, versions, comparison, stop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ServiceLostError, StopRequested, WeightError
from services.core.types import AcceptanceEstimate, ServedVersions
from tests.services.coordinator.fakes import FakeDrafter, FakeRollout
from tests.services.coordinator.world import World, tiny_config


def test_a_run_trains_drafts_publishes_and_reports() -> None:
    world = World()
    summary = world.coordinator.run()

    assert summary["status"] == "finished" and world.observer.summaries == [summary]
    assert (summary["steps"], summary["groups"], summary["rollouts"]) == (3, 18, 72)
    assert summary["policy_version"] == 3
    assert summary["heldout_reward_before"] is not None and summary["heldout_reward_after"] is not None
    assert summary["acceptance_length_first"] > 1
    assert [m.step for m in world.observer.steps] == [1, 2, 3]
    for groups in world.observer.groups.values():
        assert all([r.index for r in g.rollouts] == [0, 1, 2, 3] for g in groups)
    # Step 1 has no hidden states yet; later tails train the drafter, and the last one's state is published.
    first, *later = world.observer.steps
    assert first.drafting_s == 0 and first.idle_s > 0
    with_tail = [m for m in later if m.response_len_max > 100]
    assert with_tail and all(m.drafting_s > 0 and m.drafter_micro_steps > 0 for m in with_tail)
    published = sum(m.drafter_micro_steps > 0 for m in later)
    assert summary["drafter_version"] == published
    assert summary["drafting_seconds"] == pytest.approx(sum(m.drafting_s for m in world.observer.steps))
    assert later[-1].acceptance_length_live_offline > later[-1].acceptance_length_frozen_offline == 1.0
    for server in world.servers:
        assert server.instance._versions() == ServedVersions(3, published)


def test_both_servers_get_work_in_every_step() -> None:
    world = World()
    world.coordinator.run()
    for groups in world.observer.groups.values():
        by_server = {r.server for g in groups for r in g.rollouts}
        assert by_server == {"rollout-0", "rollout-1"}


def test_all_idle_slots_train_together_and_nothing_they_learn_is_lost() -> None:
    world = World(tiny_config(rollout={"num_servers": 4, "prompts_per_step": 12, "group_size": 4,
                                       "engine": {"type": "native", "max_running": 12, "max_len": 1024}},
                              run={"steps": 8, "eval_prompts": 0}))  # fmt: skip
    world.coordinator.run()
    spans = [s for s in world.observer.spans if s.role == "drafting"]
    assert len({s.slot for s in spans}) > 1
    assert any(a.slot != b.slot and a.start_s < b.end_s and b.start_s < a.end_s for a in spans for b in spans)
    done = sum(d.instance.micro_steps_done for d in world.drafters)
    assert sum(d.instance.merges for d in world.drafters) > 0
    assert world.coordinator._drafting.live.result(0.0)["trained"] == done  # type: ignore[attr-defined]
    assert done == sum(m.drafter_micro_steps for m in world.observer.steps)


def test_what_idle_slots_learn_is_only_published_when_it_is_better() -> None:
    class Worse(FakeDrafter):
        def estimate(self, drafters, tensors):  # type: ignore[no-untyped-def]
            return [AcceptanceEstimate(n, (0.5,), 3.0 - s["trained"] / 1000, 10) for n, s in drafters.items()]

    config = tiny_config(run={"steps": 6, "eval_prompts": 0}, drafter={"training": {"when": "always"}})
    world = World(config)
    for i, drafter in enumerate(world.drafters):
        drafter.instance = Worse(i, world.clock)
    summary = world.coordinator.run()
    kept = [e for e in world.observer.events if e.kind == "drafter_kept"]
    assert summary["drafter_version"] == 0 and len(kept) >= 3
    assert "3.000 on new rollouts" in kept[0].message


def test_the_verdict_on_the_drafter_is_shared_out_and_no_state_is_judged_twice() -> None:
    """Rollout waits for it: two trainers judge the live and the served state in the time of one, equal states once, and
    the first drafter, by which nothing is decided, when these are through."""
    asked: dict[str, list[tuple[int, list[int]]]] = {}  # by the hidden states: (slot, micro-steps of each state)

    class Judge(FakeDrafter):
        def estimate(self, drafters, tensors):  # type: ignore[no-untyped-def]
            asked.setdefault(tensors, []).append((self.slot, [state["trained"] for state in drafters.values()]))
            return super().estimate(drafters, tensors)

    world = World(tiny_config(run={"steps": 6, "eval_prompts": 0}, drafter={"training": {"when": "always"}}))
    for i, drafter in enumerate(world.drafters):
        drafter.instance = Judge(i, world.clock)
    world.coordinator.run()
    assert len(asked) == 6
    for calls in asked.values():
        judged = [state for _, states in calls for state in states]
        assert len(judged) == len(set(judged)) == len(calls), "each step anew, but no state twice"
        assert len({slot for slot, _ in calls[:2]}) == min(2, len(judged))
        assert 0 not in judged[:-1]
    assert {len(calls) for calls in asked.values()} == {1, 2, 3}, "at first nothing is learned and one is all three"
    for metrics in world.observer.steps:
        frozen, live = metrics.acceptance_length_frozen_offline, metrics.acceptance_length_live_offline
        assert frozen == 1.0 and live is not None and live >= frozen


def test_training_rests_when_it_brings_nothing_and_the_run_says_so() -> None:
    class Same(FakeDrafter):
        def estimate(self, drafters, tensors):  # type: ignore[no-untyped-def]
            return [AcceptanceEstimate(n, (0.5,), 2.0, 10) for n in drafters]

    def run(when: str) -> tuple[World, list[int]]:
        training = {"when": when, "patience": 2, "probe_every": 4}
        world = World(tiny_config(run={"steps": 12, "eval_prompts": 0}, drafter={"training": training}))
        for i, drafter in enumerate(world.drafters):
            drafter.instance = Same(i, world.clock)
        world.coordinator.run()
        return world, [m.drafter_micro_steps for m in world.observer.steps]

    world, auto = run("auto")
    (rests,) = [e for e in world.observer.events if e.kind == "drafter_rests"]
    assert "the served drafter holds" in rests.message
    _, always = run("always")
    assert sum(n > 0 for n in auto) < sum(n > 0 for n in always) / 1.5
    _, never = run("never")
    assert not any(never)


def test_checkpoints_hold_the_combined_state(tmp_path: Path) -> None:
    world = World(tiny_config(run={"steps": 4, "eval_prompts": 0}, drafter={"checkpoint_dir": str(tmp_path)}))
    world.coordinator.run()
    written = [n for d in world.drafters for n in d.instance.checkpoints]
    assert written and max(written) == sum(d.instance.micro_steps_done for d in world.drafters)


def test_spans_of_a_slot_do_not_overlap_and_cover_the_run() -> None:
    world = World()
    summary = world.coordinator.run()
    for slot in ("slot 0", "slot 1"):
        spans = sorted((s for s in world.observer.spans if s.slot == slot), key=lambda s: s.start_s)
        for before, after in itertools.pairwise(spans):
            assert before.end_s == pytest.approx(after.start_s)
        assert spans[0].start_s == 0 and spans[-1].end_s == pytest.approx(summary["wall_seconds"])


def test_without_drafter_trainers_a_run_works() -> None:
    world = World(tiny_config(speculation={"selector": {"type": "fixed"}}, drafter={"training": {"when": "never"}}))
    world.replace_services(drafters=[], initial_drafter=None)
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["drafter_version"] == 0
    assert summary["drafting_seconds"] == 0 and summary["acceptance_length_live_last_offline"] is None


def test_comparison_measures_both_ways_and_checks_greedy() -> None:
    world = World(tiny_config(run={"steps": 1, "eval_prompts": 2, "compare_prompts": 3, "compare_repeats": 3}))
    summary = world.coordinator.run()
    assert summary["rollout_seconds_off"] > 0 and summary["rollout_seconds_on"] > 0
    assert (summary["greedy_mismatches"], summary["greedy_checked"]) == (0, 3)
    assert all(s.instance.strategy == "eagle_3_1_4" for s in world.servers if s.instance.served)


def test_greedy_mismatches_are_counted() -> None:
    class Lossy(FakeRollout):
        def _rollout(self, w, index, seed, length, _):  # type: ignore[no-untyped-def]
            wrong = self.strategy == "eagle_3_1_4" and w.sampling.temperature == 0
            return super()._rollout(w, index, seed + wrong, length, _)

    world = World(tiny_config(run={"steps": 1, "eval_prompts": 0, "compare_prompts": 3, "compare_repeats": 1}))
    for i, server in enumerate(world.servers):
        server.instance = Lossy(i, world.clock, 12)
    assert world.coordinator.run()["greedy_mismatches"] == 3


def test_a_server_that_serves_other_weights_ends_the_run_with_an_event() -> None:
    class Deaf(FakeRollout):
        def load_policy(self, version, tensors, epoch):  # type: ignore[no-untyped-def]
            if version < 2:
                super().load_policy(version, tensors, epoch)
            return self._versions()

    world = World()
    world.servers[1].instance = Deaf(1, world.clock, 12)
    with pytest.raises(WeightError, match="rollout-1 serves policy version 1"):
        world.coordinator.run()
    assert [e.kind for e in world.observer.events if e.kind == "version_mismatch"]
    assert world.observer.summaries[0]["status"] == "failed" and "rollout-1" in world.observer.summaries[0]["error"]


def test_stop_ends_the_run_at_a_safe_point_with_a_valid_summary() -> None:
    world = World()
    world.observer.step = lambda metrics: world.coordinator.stop()  # type: ignore[method-assign]
    with pytest.raises(StopRequested):
        world.coordinator.run()
    (summary,) = world.observer.summaries
    assert summary["status"] == "stopped" and summary["steps"] == 1 and summary["error"] is None


@pytest.mark.parametrize(
    ("method", "nth", "stops"),
    [
        ("train_step", 2, 0),
        ("publish", 2, 0),
        *((method, 1, stops) for method in ("checkpoint", "flush") for stops in (0, 1)),
    ],
)
def test_the_policy_trainers_death_ends_the_run_and_is_told_whatever_it_was_asked(
    method: str, nth: int, stops: int
) -> None:
    """`stops`: the step after which the user stops the run."""
    world = World(tiny_config(run={"checkpoint_every": 2}))
    alive, calls = getattr(world.policy.instance, method), itertools.count(1)

    def dies(*args: Any) -> Any:
        if next(calls) < nth:
            return alive(*args)
        world.policy.kill()
        raise ServiceLostError("policy", "killed")

    setattr(world.policy.instance, method, dies)
    world.observer.step = lambda m: world.coordinator.stop() if m.step == stops else None  # type: ignore[method-assign]
    with pytest.raises(ServiceLostError, match="learned since the last checkpoint died with it"):
        world.coordinator.run()
    (told,) = (e for e in world.observer.events if e.kind == "policy_lost")
    assert told.subject == "policy" and "died with it" in told.message
    assert world.observer.summaries[0]["status"] == ("stopped" if stops else "failed")


def test_progress_views_tell_phase_and_slots() -> None:
    world = World()
    world.coordinator.run()
    phases = {v.phase for v in world.observer.views}
    assert {"rollout", "reward", "policy", "publish", "evaluation", "finished"} <= phases
    rollout = [v for v in world.observer.views if v.phase == "rollout"]
    assert any(v.rollouts_running for v in rollout) and any(0 < v.rollouts_done < v.rollouts_total for v in rollout)
    assert any("drafting" in v.slots.values() for v in rollout)
