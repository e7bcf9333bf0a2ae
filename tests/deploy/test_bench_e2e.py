from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.bench_e2e import Plan, run_bench
from deploy.e2e_figures import agreement, result, sign_flip_p, table, write
from deploy.e2e_runs import STEPS_FILE, Run, measured
from deploy.provenance import ROOT
from services.config.load import load_config
from services.config.schema import RolloutConfig
from services.core.errors import ConfigError, LongtailError
from services.report.modes import draw_modes
from services.report.rollouts_file import read_columns, rollouts_path
from services.report.run_data import load_run
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
    found = result(config, [runs[0], slow_start], ("off", "full"), None, False)
    assert found["step_s"] == {"off": 4.0, "full": 2.0} and found["speedup"]["full"] == 2.0
    assert found["speedup_range"]["full"] == [2.0, 2.0] and found["unfinished"] == []
    assert "full" in table(found)
    write(tmp_path / "out", found)
    assert ET.fromstring((tmp_path / "out" / "e2e.svg").read_text()).tag.endswith("svg")


def test_a_run_that_ended_early_counts_as_far_as_it_came(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path)
    whole = [a_run(mode, seed, 3.0, [0.1, 0.2, 0.3]) for seed in (0, 1) for mode in ("off", "full")]
    early = replace(whole[3], steps=whole[3].steps[:2], error="policy is lost: it died")
    nothing = replace(a_run("tlt", 0, 3.0, [0.1]), error="no room on the GPU")
    found = result(config, [*whole[:3], early, nothing], ("off", "tlt", "full"), None, True)
    assert list(found["modes"]) == ["off", "full"], "of tlt nothing is known: its only step does not count"
    assert found["rewards_agree"]["full"]["pairs"] == 5
    assert [(u["mode"], u["seed"], u["steps"]) for u in found["unfinished"]] == [("full", 1, 2), ("tlt", 0, 1)]
    assert "seed 0 tlt, 1 steps: no room on the GPU" in table(found)
    write(tmp_path / "out", found)  # curves of unequal length
    with pytest.raises(LongtailError, match="no run has figures: no room"):
        result(config, [nothing], ("tlt",), None, True)


def test_without_off_there_is_no_speedup(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path)
    found = result(config, [a_run("full", 0, 1.0, [0.1, 0.2])], ("off", "full"), None, True)
    assert found["speedup"] == found["speedup_same_steps"] == {} and found["rewards_agree"] == {}
    assert table(found).splitlines()[1].split()[:4] == ["full", "2.00", "-", "-"]


def test_steps_with_the_same_prompts_are_compared_where_medians_are_of_others(tmp_path: Path) -> None:
    """Problems of the third step are long; the run in mode full ended before the fourth, which is short."""
    config = tiny_run(make_model_folder(tmp_path), tmp_path)
    off, full = (a_run(mode, 0, 3.0, [0.1] * 4) for mode in ("off", "full"))

    def lasting(run: Run, rollout_s: Sequence[float]) -> Run:
        return replace(run, steps=tuple(replace(m, rollout_s=s) for m, s in zip(run.steps, rollout_s, strict=False)))

    found = result(config, [lasting(off, (9, 1, 19, 1)), lasting(full, (9, 1, 9))], ("off", "full"), None, False)
    assert found["speedup_same_steps"] == {"off": 1.0, "full": round((2 + 20) / (2 + 10), 4)}
    assert found["speedup"]["full"] < 1, "the medians are of a short step and of half a long one"
    means = found["modes"]["off"]["mean_step"]
    assert sum(means.values()) == pytest.approx((2 + 20 + 2) / 3), "phases add up to a step"
    assert f"{found['speedup_same_steps']['full']:.2f} x off" in draw_modes(found)


def test_a_real_run_in_two_modes(tmp_path: Path) -> None:
    config, told = tiny_run(make_model_folder(tmp_path), tmp_path), list[str]()
    found = run_bench(config, Plan((0,), ("off", "full"), out=tmp_path / "out"), told.append)
    assert found["modes"]["off"]["acceptance_length"] is None
    assert found["modes"]["full"]["tokens_per_s"] > 0
    assert len(found["modes"]["full"]["reward"][0]) == config.run.steps and set(found["step_s"]) == {"off", "full"}
    assert isinstance(found["rewards_agree"]["full"]["p"], float)
    assert found["modes"]["off"]["wall_s"] >= found["step_s"]["off"] - 1e-3
    assert json.loads((tmp_path / "out" / "e2e.json").read_text())["step_s"] == found["step_s"]
    rows = [json.loads(line) for line in (tmp_path / "out" / STEPS_FILE).read_text().splitlines()]
    steps = [(row["mode"], row["step"]["step"]) for row in rows if "step" in row]
    assert steps == [(mode, step) for mode in ("off", "full") for step in (1, 2, 3)]
    assert sum("step 2: " in line for line in told) == 2
    for mode in ("off", "full"):
        check_run_folder(tmp_path / "out" / "runs" / f"{mode}-0", steps=3)


def check_run_folder(folder: Path, steps: int) -> None:
    """Whole, and with times on the lines of its servers: two servers are not told each other's work."""
    summary, data = json.loads((folder / "summary.json").read_text()), load_run(folder)
    assert (summary["status"], summary["steps"], summary["run_id"]) == ("finished", steps, folder.name)
    assert load_config(folder / "config.yaml").run.id == folder.name and (folder / "report.html").is_file()
    assert [row["step"] for row in data.steps] == list(range(1, steps + 1)) and data.spans
    for row in data.steps:
        times = read_columns(rollouts_path(folder / "rollouts", row["step"]), ["server", "started_s", "finished_s"])
        assert {t["server"] for t in times} == {"rollout-0", "rollout-1"}
        longest = max(t["finished_s"] for t in times) - min(t["started_s"] for t in times)
        assert 0 < longest <= row["rollout_s"] + 1e-3


def test_a_bench_replaces_the_run_folders_of_an_earlier_one_and_leaves_others(tmp_path: Path) -> None:
    run, out = {"steps": 1}, tmp_path / "out"
    config = tiny_run(make_model_folder(tmp_path), tmp_path, run=run)
    found = list[str]()
    for temperature in (1.0, 0.7):
        changed = config.model_copy(update={"rollout": at_temperature(config.rollout, temperature)})
        assert not run_bench(changed, Plan((0,), ("off",), out=out), lambda line: None)["unfinished"]
        found.append((out / "runs" / "off-0" / "config.yaml").read_text())
    assert "temperature: 1.0" in found[0] and "temperature: 0.7" in found[1]
    assert len(load_run(out / "runs" / "off-0").steps) == 1
    (out / "runs" / "full-0").mkdir()
    (out / "runs" / "full-0" / "notes.txt").write_text("of a person")
    with pytest.raises(LongtailError, match=r"is no run folder: it has no config\.yaml, but notes\.txt"):
        run_bench(config, Plan((0,), ("full",), out=out), lambda line: None)
    assert (out / "runs" / "full-0" / "notes.txt").is_file()


def test_trials_of_the_best_fixed_strategy_leave_no_run_folder(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path, run={"steps": 1})
    run_bench(config, Plan((0,), ("static",), trial_steps=1, out=tmp_path / "out"), lambda line: None)
    assert [f.name for f in (tmp_path / "out" / "runs").iterdir()] == ["static-0"]


def at_temperature(rollout: RolloutConfig, temperature: float) -> RolloutConfig:
    return rollout.model_copy(update={"sampling": rollout.sampling.model_copy(update={"temperature": temperature})})


def test_a_run_that_fails_leaves_the_others_their_figures(tmp_path: Path) -> None:
    """A drafter folder that is no drafter: modes that draft fail when their services are built, `off` does not ask."""
    model = make_model_folder(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    config = tiny_run(model, tmp_path, drafter={"path": str(tmp_path / "broken")})
    told = list[str]()
    found = run_bench(config, Plan((0,), ("full", "off"), out=tmp_path / "out"), told.append)
    assert list(found["step_s"]) == ["off"] and [u["mode"] for u in found["unfinished"]] == ["full"]
    assert any("full    failed after 0 steps: " in line for line in told)
    rows = [json.loads(line) for line in (tmp_path / "out" / STEPS_FILE).read_text().splitlines()]
    assert [row["mode"] for row in rows if "error" in row] == ["full"]


def test_the_strategy_of_mode_static_can_be_named(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path)
    found = run_bench(config, Plan((0,), ("static",), static="eagle_2_1_3"), lambda line: None)
    assert found["static_strategy"] == "eagle_2_1_3" and found["modes"]["static"]["acceptance_length"] > 1
    with pytest.raises(ConfigError, match="--static eagle_9_1_10 is none of the run's strategies: eagle_2_1_3"):
        run_bench(config, Plan((0,), static="eagle_9_1_10"))


def test_modes_that_the_engine_has_not_are_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "e2e", "pocket-tiny", "--modes", "off,ema"])
    assert (
        done.exit_code == 2 and "--modes has ema: with rollout.engine.type native there are off, static" in done.stderr
    )


@pytest.mark.parametrize("states", ["policy", "engine"])
def test_a_single_server_trains_its_drafter_while_the_policy_trains(tmp_path: Path, states: str) -> None:
    """Real services, on time lines of their own; no slot is ever idle while it generates."""
    overrides = (
        "rollout.num_servers=1", f"drafter.states={states}", "drafter.training={when: always, beside_policy: true}",
        "run.steps=3", "run.eval_prompts=0", "run.checkpoint_every=0", "run.compare_prompts=0",
        "rollout.prompts_per_step=4", "rollout.group_size=4",
    )  # fmt: skip
    config = load_config("pocket-tiny", overrides=overrides, presets_dir=ROOT / "deploy" / "presets")
    run = measured(config, "full", False, lambda line: None, tmp_path)
    assert not run.error and len(run.steps) == 3
    assert all(step.drafter_micro_steps and step.drafting_s > 0 for step in run.steps[1:])
    assert run.steps[-1].acceptance_length_live_offline is not None
