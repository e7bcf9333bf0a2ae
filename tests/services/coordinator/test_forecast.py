"""The prediction for the next step: asked with the last one's lengths, and never in the way of a run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.coordinator.world import World


def test_a_step_is_told_with_what_was_predicted_before_it() -> None:
    world = World()
    world.coordinator.run()
    assert [m.predicted_gain for m in world.observer.steps] == [None, pytest.approx(4 / 3), pytest.approx(4 / 3)]
    for step, groups in world.observer.groups.items():
        asked = [server.instance.predicted[step - 1] for server in world.servers]
        wanted = sorted(len(r.response_ids) for g in groups for r in g.rollouts)
        assert sorted(n for work in asked for n in work.lengths) == wanted, "every rollout at one server"
        assert all((w.group_size, w.capacity, w.prompt_tokens) == (4, 12, 3.0) for w in asked)


def test_servers_that_predict_nothing_leave_it_unknown() -> None:
    world = World()
    for server in world.servers:
        server.instance.predicts = False
    world.coordinator.run()
    assert [m.predicted_gain for m in world.observer.steps] == [None, None, None]
    one = World()
    one.servers[0].instance.predicts = False
    one.coordinator.run()
    assert one.observer.steps[1].predicted_gain == pytest.approx(4 / 3), "the other server's word"


def test_a_server_that_dies_over_the_question_costs_no_step() -> None:
    world = World()

    def kill(view: Any) -> None:
        if view.step == 1 and view.phase == "policy" and world.servers[1].starts == 1:
            if world.servers[1].instance is not None:
                world.servers[1].kill()
        elif world.servers[1].instance is None and view.step == 2:
            world.servers[1].restart()

    world.observer.watch = kill
    world.coordinator.run()
    assert len(world.observer.steps) == 3 and world.servers[1].starts == 2
    assert world.observer.steps[1].predicted_gain == pytest.approx(4 / 3)
