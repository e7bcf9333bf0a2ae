from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulator.learning import GivenAcceptance, Learning, Skill

SKILLS = st.floats(0.0, 0.95)


@given(SKILLS, st.integers(1, 500), st.integers(1, 500))
def test_training_in_parts_is_training_at_once(skill: float, first: int, second: int) -> None:
    law, state = Learning(), Skill(skill, 0, 0)
    parts = law.trained(law.trained(state, first, 0), second, 0)
    once = law.trained(state, first + second, 0)
    assert parts.skill == pytest.approx(once.skill) and parts.total_steps == once.total_steps


@given(SKILLS, st.integers(1, 200), st.integers(1, 9))
def test_slots_that_train_side_by_side_bring_more_than_one_and_less_than_in_turn(
    skill: float, steps: int, slots: int
) -> None:
    law, state = Learning(), Skill(skill, 0, 0)
    alone = law.trained(state, steps, 0)
    merged = law.merged([alone] * slots, [steps] * slots)
    in_turn = law.trained(state, steps * slots, 0)
    assert alone.skill - 1e-9 <= merged.skill <= in_turn.skill + 1e-9
    assert merged.total_steps == steps * slots


def test_drift_takes_skill_version_by_version_and_training_gives_it_back() -> None:
    law = Learning(drift=0.1)
    state = Skill(0.8, 3, 0)
    assert [round(law.skill_at(state, v), 4) for v in (2, 3, 4, 5)] == [0.8, 0.8, 0.72, 0.648]
    assert law.trained(state, 400, 5).skill == pytest.approx(1 - (1 - 0.648) / 2)


def test_acceptance_lies_between_floor_and_ceiling_and_a_missing_drafter_has_none() -> None:
    law = Learning()
    worst, best = (law.acceptance(Skill(s, 0, 0), 0)[0] for s in (0.0, 1.0))
    assert (worst, best) == (law.floor, law.ceiling)
    assert law.law(None, 0, -1).eagle[0] == 0.0
    assert GivenAcceptance(chain=(0.7, 0.5)).acceptance(Skill(0, 0, 0), 9)[:4] == (0.7, 0.5, 0.5, 0.5)
