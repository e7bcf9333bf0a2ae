from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import bench_trl
from deploy.bench_trl import OURS, THEIRS, Curve, TheirSettings, compared, curve_of_run, fitted, run_bench
from deploy.cli_shared import PRESETS_DIR
from deploy.inputs import load_inputs
from services.config.load import load_config
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError, DataError, ServiceLostError
from services.core.types import Prompt, SamplingParams
from services.models.tokenizer import EOS, load_tokenizer
from services.reward.service import build_reward_service

pytest.importorskip("trl", reason="the comparison needs TRL: pip install trl==1.16.0")

TINY = (
    "rollout.prompts_per_step=2", "rollout.sampling.max_tokens=24", "placement.mode=local",
    "speculation.selector={type: fixed}", "policy.threads=1",
)  # fmt: skip


def config_of(*overrides: str) -> ClusterConfig:
    return load_config("pocket-tiny", overrides=list(overrides), presets_dir=PRESETS_DIR)


def curve(seconds: float, *rewards: float) -> Curve:
    return Curve((seconds,) * (len(rewards) - 1), rewards, (10,) * len(rewards))


def test_what_is_compared() -> None:
    found = compared({OURS: [curve(2.0, 0.0, 0.2, 0.4, 0.6)], THEIRS: [curve(5.0, 0.1, 0.1, 0.3, 0.5)]})
    assert found["step_s"] == {OURS: 2.0, THEIRS: 5.0} and found["ratio"] == 2.5
    assert found["early_reward"] == {OURS: [0.1, 0.1], THEIRS: [0.1, 0.0]}
    assert found["late_reward"] == {OURS: [0.5, 0.1], THEIRS: [0.4, 0.1]}
    assert found["late_reward_difference"] == [0.1, pytest.approx(0.1414, abs=1e-4)]
    assert found["tokens_per_step"] == {OURS: 10, THEIRS: 10}


@given(st.lists(st.floats(0.01, 50.0), min_size=2, max_size=8))
def test_a_step_lasts_from_the_end_of_the_one_before(seconds: list[float]) -> None:
    """So the first one, which starts things up, is left out, and what lies between steps is not."""
    ends = [sum(seconds[: i + 1]) for i in range(len(seconds))]
    rows = [{"at_s": end, "reward_mean": 0.5, "response_tokens": 7} for end in ends]
    found = curve_of_run(rows)
    assert found.step_s == pytest.approx(seconds[1:]) and len(found.reward) == len(seconds)


def test_both_sides_get_what_both_can_do() -> None:
    given = config_of("policy={decay_steps: 9, inner_epochs: 2, zero_variance: skip}", "run.eval_prompts=4")
    config = fitted(given, 5, 3, TheirSettings(4, 1))
    policy, run = config.policy, config.run
    assert (policy.decay_steps, policy.inner_epochs, policy.zero_variance) == (0, 1, "keep")
    assert (run.steps, run.seed, run.eval_prompts, run.checkpoint_every, run.tracking) == (5, 3, 0, 0, ())
    assert config.speculation == given.speculation and config.rollout == given.rollout


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.algorithm={type: dapo}", "set policy.algorithm"),
        ("rollout.sampling.min_p=0.1", "min_p"),
        ("rollout.sampling.stop_strings=[x]", "stop_strings"),
        ("rollout.prompts_per_step=3", "must divide a step's 6 rollouts"),
    ],
)
def test_what_cannot_be_compared_is_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fitted(config_of(override), 4, 0, TheirSettings(4, 1))


def test_without_trl_the_way_to_get_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(bench_trl, "version", missing)
    with pytest.raises(ConfigError, match="pip install trl"):
        run_bench(config_of(), 4, 1, TheirSettings(4, 1))


def test_both_sides_feed_the_same_ids() -> None:
    from deploy.trl_side import check_ids, their_tokenizer

    config = config_of()
    prompts, theirs = load_inputs(config).train, their_tokenizer("pocket")
    check_ids(prompts, theirs, chat_template=False)
    assert (theirs.pad_token_id, theirs.eos_token_id) == (0, EOS)
    moved = Prompt("x", prompts[0].text, prompts[0].token_ids[1:], "", "t")
    with pytest.raises(DataError, match="different ids"):
        check_ids([moved], theirs, chat_template=False)


def test_their_responses_are_judged_as_ours() -> None:
    from deploy.trl_side import _Scorer

    tokenizer, rewards = load_tokenizer("pocket"), build_reward_service(config_of())
    prompt = Prompt("p", "1 + 2=", tuple(tokenizer.render("1 + 2=", False)), "3", "chain_sum")
    scorer = _Scorer(rewards, tokenizer, SamplingParams(stop_token_ids=(EOS,)), {prompt.text: prompt})
    right, wrong = ([*tokenizer.encode(text), EOS] for text in ("1+2=3; #3", "#4"))
    try:
        responses = [right, wrong, right[:-3]]
        assert scorer(key=[prompt.text] * 3, completion_ids=responses) == [1.0, 0.0, 0.0]
    finally:
        rewards.close()
    assert scorer.means == [pytest.approx(1 / 3)] and scorer.tokens == [len(right) * 2 - 3 + len(wrong)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_train_and_are_timed() -> None:
    lines: list[str] = []
    found = run_bench(config_of(*TINY), 4, 1, TheirSettings(4, 1), lines.append)
    assert found["workload"]["model"] == "pocket" and found["trl"] and len(lines) == 2
    for side in (OURS, THEIRS):
        (one,) = found["curves"][side]
        assert len(one["step_s"]) == 3 and len(one["reward"]) == 4
        assert all(4 <= tokens <= 4 * 24 for tokens in one["response_tokens"])
        assert found["step_s"][side] > 0
    assert found["ratio"] == pytest.approx(found["step_s"][THEIRS] / found["step_s"][OURS], rel=0.02)


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServiceLostError, match="No module named"):
        bench_trl._to_the_end(["no_such_module_anywhere"], tmp_path)
