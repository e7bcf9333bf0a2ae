from __future__ import annotations

from deploy.placement import actor_env, bundles, plan_actors
from tests.services.coordinator.world import tiny_config


def test_a_slot_is_one_bundle_that_server_and_trainer_share() -> None:
    config = tiny_config(placement={"cpus_per_slot": 0.5, "gpus_per_slot": 1.0})
    assert bundles(config) == [{"CPU": 0.5, "GPU": 1.0}] * 2
    plans = {p.name: p for p in plan_actors(config)}
    assert plans.keys() == {"rollout-0", "rollout-1", "drafter-0", "drafter-1", "policy", "reward"}
    for slot in (0, 1):
        pair = [plans[f"rollout-{slot}"], plans[f"drafter-{slot}"]]
        assert {p.slot for p in pair} == {slot}
        assert sum(p.cpus for p in pair) == 0.5 and sum(p.gpus for p in pair) == 1.0
    # A policy trainer that came back without its weights would be worse than a stopped run.
    assert plans["policy"].restarts == 0 and plans["rollout-0"].restarts == config.coordinator.max_restarts


def test_of_several_gpus_the_server_takes_all_and_lends_the_trainer_one() -> None:
    plans = {p.name: p for p in plan_actors(tiny_config(placement={"gpus_per_slot": 2.0}))}
    assert (plans["rollout-1"].gpus, plans["rollout-1"].borrows_gpu) == (2.0, False)
    assert (plans["drafter-1"].gpus, plans["drafter-1"].borrows_gpu) == (0.0, True)
    assert not any(p.borrows_gpu for p in plan_actors(tiny_config(placement={"gpus_per_slot": 1.0})))


def test_without_an_eagle_strategy_no_drafter_trainer_is_started() -> None:
    config = tiny_config(speculation={"selector": {"type": "fixed"}})
    assert {p.name for p in plan_actors(config)} == {"rollout-0", "rollout-1", "policy", "reward"}


def test_the_leader_of_a_policy_team_takes_no_resources_its_workers_do() -> None:
    config = tiny_config(placement={"policy_workers": 2, "policy_cpus": 1.0})
    (plan,) = (p for p in plan_actors(config) if p.name == "policy")
    assert (plan.kind, plan.cpus, plan.gpus, plan.restarts) == ("policy_team", 0.0, 0.0, 0)
    (alone,) = (p for p in plan_actors(tiny_config(placement={"policy_cpus": 1.0})) if p.name == "policy")
    assert (alone.kind, alone.cpus) == ("policy", 1.0)


def test_slots_that_ask_for_nothing_need_no_placement_group() -> None:
    assert bundles(tiny_config(placement={"cpus_per_slot": 0.0})) == []


def test_threads_are_set_for_every_numeric_library() -> None:
    assert {actor_env(3)[k] for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}


def test_threads_that_wait_for_each_other_sleep() -> None:
    """Several processes share the cores here: one that spins takes them from the one that it waits for."""
    assert actor_env(2)["OMP_WAIT_POLICY"] == "PASSIVE"
