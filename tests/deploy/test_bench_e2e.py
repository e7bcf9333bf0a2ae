from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deploy.bench_e2e import Run, agreement, result, run_bench, sign_flip_p, table, write
from tests.deploy.tiny_run import make_model_folder, tiny_run
from tests.services.report.conftest import make_metrics


def a_run(mode: str, seed: int, rollout_s: float, rewards: list[float]) -> Run:
    """Steps of `rollout_s` and a second."""
    base = replace(make_metrics(random.Random(0), 1, 0.0, rollout_s, 0.0, 0.0), reward_s=0.0, publish_s=0.0)
    rows = enumerate(rewards, start=1)
    return Run(mode, seed, tuple(replace(base, step=i, policy_s=1.0, reward_mean=r) for i, r in rows), 2)


def test_sign_flips_are_counted_exactly_where_they_are_few() -> None:
    assert sign_flip_p([1.0, 1.0, 1.0], random.Random(0)) == 2 / 8
    assert sign_flip_p([1.0, -1.0], random.Random(0)) == 1.0
    assert sign_flip_p([0.5] * 20, random.Random(0)) < 0.001


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8))
def test_a_p_value_does_not_depend_on_the_sign(differences: list[float]) -> None:
    rng = random.Random(0)
    assert sign_flip_p(differences, rng) == sign_flip_p([-d for d in differences], rng) > 0


def test_rewards_that_differ_are_told_and_those_that_do_not_agree() -> None:
    rng = random.Random(1)
    base = {seed: [0.5 + rng.gauss(0, 0.02) for _ in range(8)] for seed in range(3)}
    runs = [a_run("off", s, 2.0, r) for s, r in base.items()]
    runs += [a_run("full", s, 1.0, [v + rng.gauss(0, 0.02) for v in r]) for s, r in base.items()]
    runs += [a_run("tlt", s, 1.0, [v - 0.1 for v in r]) for s, r in base.items()]
    assert agreement(runs, "full", 2)["agree"] and not agreement(runs, "tlt", 2)["agree"]


def test_figures_leave_the_first_step_out_and_compare_with_off(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path)
    runs = [a_run("off", 0, 3.0, [0.1, 0.2]), a_run("full", 0, 1.0, [0.1, 0.2])]
    slow_start = replace(runs[1], steps=(replace(runs[1].steps[0], rollout_s=99.0), *runs[1].steps[1:]))
    found = result(config, [runs[0], slow_start], ("off", "full"), None)
    assert found["step_s"] == {"off": 4.0, "full": 2.0} and found["speedup"]["full"] == 2.0
    assert found["speedup_range"]["full"] == [2.0, 2.0]
    assert "full" in table(found)
    write(tmp_path / "out", found)
    assert ET.fromstring((tmp_path / "out" / "e2e.svg").read_text()).tag.endswith("svg")


def test_a_real_run_in_two_modes(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path)
    found = run_bench(config, [0], ["off", "full"], say=lambda line: None)
    assert found["modes"]["off"]["acceptance_length"] is None
    assert found["modes"]["full"]["tokens_per_s"] > 0
    assert len(found["modes"]["full"]["reward"][0]) == config.run.steps and set(found["step_s"]) == {"off", "full"}
    assert isinstance(found["rewards_agree"]["full"]["p"], float)
