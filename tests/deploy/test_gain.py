"""`longtail gain`: lengths, acceptance and costs from wherever they come, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.gain import Answer, Question, answer, by_bucket, lines
from deploy.provenance import ROOT
from services.config.load import load_config
from services.config.schema import ClusterConfig
from services.config.speculation import AdaptiveSelector, eagle_chain
from services.core.errors import ConfigError
from services.report.run_folder import RunFolder
from tests.services.report.conftest import drive_run

NOTHING = Question("cpu-pocket", None, None, None, None, None)


@pytest.fixture(scope="module")
def config() -> ClusterConfig:
    base = load_config("pocket-tiny", presets_dir=ROOT / "deploy" / "presets")
    chains = AdaptiveSelector(strategies=(eagle_chain(2), eagle_chain(4)))
    base = base.model_copy(update={"speculation": base.speculation.model_copy(update={"selector": chains})})
    rollout = base.rollout.model_copy(update={"group_size": 4, "prompts_per_step": 10})
    return base.model_copy(update={"rollout": rollout})


def asked(config: ClusterConfig, **changes: object) -> Answer:
    return answer(config, Question(**{**vars(NOTHING), **changes}))  # type: ignore[arg-type]


def test_a_lognormal_has_its_median_and_is_cut(config: ClusterConfig) -> None:
    work = asked(config, lognormal=(30.0, 1.0)).work
    assert len(work.lengths) == 40 and median(work.lengths) == pytest.approx(30, rel=0.05)
    assert max(work.lengths) == config.rollout.sampling.max_tokens, "what would be longer is cut"
    assert set(asked(config, lognormal=(30.0, 0.0)).work.lengths) == {30}


def test_lengths_of_a_file_keep_their_distribution(config: ClusterConfig, tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text("[10, 20, 30, 5000]")
    lengths = asked(config, lengths=file).work.lengths
    assert [lengths.count(n) for n in (10, 20, 30, 96)] == [10, 10, 10, 10]


def test_a_run_tells_lengths_prompts_and_acceptance(config: ClusterConfig, tmp_path: Path) -> None:
    folder = RunFolder(ClusterConfig.model_validate({"run": {"id": "told", "dir": str(tmp_path)}}))
    drive_run(folder, steps=2)
    found = asked(config, lengths=folder.path)
    assert found.work.prompt_tokens == 3.0 and "step 2 of told" in found.sources[0]
    # each made-up rollout has verify steps that accepted 0, 1, 2 drafts in 2, 3 and 1 cases
    assert found.sources[1].startswith("0.67, 0.25, of the run's")
    assert asked(config, lengths=folder.path, acceptance=(0.9,)).sources[1] == "0.90"


def test_a_longer_tail_and_better_drafts_gain_more(config: ClusterConfig) -> None:
    bad, good = (asked(config, lognormal=(40.0, 0.5), acceptance=(a,)).phase_gain for a in (0.1, 0.9))
    assert bad == pytest.approx(1.0) and good > 1.3
    step = asked(config, lognormal=(40.0, 0.5), acceptance=(0.9,), rollout_share=0.5)
    assert step.step_gain == pytest.approx(2 * good / (1 + good)), "half of the step is as it was"


def test_what_is_assumed_is_said(config: ClusterConfig) -> None:
    text = "\n".join(lines(asked(config)))
    assert text.count("assumed") == 2 and "predicted speed-up of the rollout phase" in text
    assert "of the step" not in text


def test_buckets_add_up_to_the_phase(config: ClusterConfig) -> None:
    found = asked(config, lognormal=(40.0, 0.8), acceptance=(0.8,))
    rows = by_bucket(found)
    assert sum(r.seconds for r in rows) == pytest.approx(sum(r.gain.on_s for r in found.replays))
    assert max(r.gain.on_s for r in found.replays) == found.phase_on_s, "the slowest server ends the phase"
    assert rows[-1].running == "1" and all(r.speedup > 0.99 for r in rows)


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--costs", "nowhere"], "recorded are cpu-pocket, h100-270m, h100-7b"),
        (["--lengths", "/no/such/place"], "neither a run folder nor a file of lengths"),
        (["--lognormal", "20"], "give two numbers"),
        (["--lognormal", "a,b"], "give numbers with commas"),
        (["--lognormal", "0.2,1"], "give the median in tokens, at least 1"),
        (["--acceptance", "0.8,1.2"], "between 0 and 1"),
        (["speculation.selector={type: fixed, strategy: {drafter: off}}"], "no EAGLE strategy"),
    ],
)
def test_mistakes_are_told_with_a_remedy(arguments: list[str], told: str) -> None:
    costs = [] if "--costs" in arguments else ["--costs", "cpu-pocket"]
    result = CliRunner().invoke(app, ["gain", "pocket-tiny", *arguments, *costs])
    assert result.exit_code != 0 and told in " ".join(result.output.split())


def test_an_sglang_engine_needs_recorded_costs() -> None:
    config = load_config("reasoner-sglang", presets_dir=ROOT / "deploy" / "presets")
    with pytest.raises(ConfigError, match="--costs cpu-pocket, h100-270m, h100-7b"):
        asked(config, costs=None)
    assert asked(config, costs="h100-7b", lognormal=(50.0, 1.2), acceptance=(0.8,)).phase_gain > 1.2


def test_json_is_one_line() -> None:
    result = CliRunner().invoke(app, ["gain", "pocket-tiny", "--costs", "cpu-pocket", "--json"])
    assert result.exit_code == 0 and set(json.loads(result.output)) >= {"predicted_gain", "buckets"}


def test_costs_may_be_a_file(config: ClusterConfig, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text((ROOT / "deploy" / "costs" / "cpu-pocket.json").read_text())
    assert asked(config, costs=str(file)).phase_gain == asked(config).phase_gain
