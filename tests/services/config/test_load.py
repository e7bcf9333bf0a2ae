"""Files and overrides to one checked configuration; mistakes named with what was probably meant."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.config.load import load_config
from services.config.schema import ClusterConfig, FileData, NativeEngine, ReasoningGymData, SGLangEngine
from services.config.speculation import StrategyConfig
from services.config.tree import all_keys
from services.core.errors import ConfigError


def mistake(*overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*files, overrides=overrides)
    return str(caught.value)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert load_config() == ClusterConfig()


def test_later_layers_win(tmp_path: Path) -> None:
    preset = written(tmp_path, "preset.yaml", "rollout: {group_size: 4, prompts_per_step: 5}\nrun: {steps: 6}")
    further = written(tmp_path, "further.yaml", "rollout: {prompts_per_step: 7}\nrun: {steps: 8}")
    config = load_config(preset, further, overrides=["run.steps=9"])
    assert (config.rollout.group_size, config.rollout.prompts_per_step, config.run.steps) == (4, 7, 9)
    assert config.rollout.num_servers == ClusterConfig().rollout.num_servers


def test_the_last_override_wins() -> None:
    assert load_config(overrides=["run.steps=3", "run.steps=4"]).run.steps == 4


def test_overrides_are_yaml() -> None:
    config = load_config(
        overrides=[
            "policy.learning_rate=1e-5",
            "rollout.sampling.stop_strings=[END, '#']",
            "drafter.training.when=never",
            "data.source.terms={median: 3}",
            "run.name=a=b",
        ]
    )
    assert config.policy.learning_rate == 1e-5
    assert config.rollout.sampling.stop_strings == ("END", "#")
    assert config.drafter.training.when == "never"
    assert isinstance(config.data.source, ReasoningGymData) and config.data.source.terms is not None
    assert config.data.source.terms.median == 3.0
    assert config.run.name == "a=b"


def test_off_is_a_word_not_false() -> None:
    config = load_config(overrides=["speculation.selector.strategy.drafter=off"])
    assert config.speculation.strategies[0].drafter == "off"


def test_null_takes_an_optional_section_away(tmp_path: Path) -> None:
    preset = written(tmp_path, "preset.yaml", "data: {source: {terms: {median: 3}}}")
    config = load_config(preset, overrides=["data.source.terms=null"])
    assert isinstance(config.data.source, ReasoningGymData) and config.data.source.terms is None


def test_a_section_with_every_key_commented_out_changes_nothing(tmp_path: Path) -> None:
    preset = written(tmp_path, "preset.yaml", "policy: {threads: 1}")
    further = written(tmp_path, "further.yaml", "policy:\n  # threads: 3\n")
    assert load_config(preset, further).policy.threads == 1


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfrun: {steps: 3}\n")
    assert load_config(path).run.steps == 3


# ------------------------------------------------------------------ variants


def test_a_variant_without_its_type_is_the_default_one() -> None:
    engine = load_config(overrides=["rollout.engine.threads=2"]).rollout.engine
    assert isinstance(engine, NativeEngine) and engine.threads == 2


def test_changing_the_type_drops_the_old_variants_keys(tmp_path: Path) -> None:
    preset = written(tmp_path, "preset.yaml", "rollout: {engine: {type: native, max_running: 9}}")
    overrides = ["rollout.engine.type=sglang", "placement={gpus_per_slot: 1, policy_gpus: 1}"]
    assert load_config(preset, overrides=overrides).rollout.engine == SGLangEngine()
    config = load_config(overrides=["data.source.path=prompts.jsonl", "data.source.type=file"])
    assert config.data.source == FileData(path=Path("prompts.jsonl"))


def test_another_drafter_makes_another_strategy(tmp_path: Path) -> None:
    preset = written(
        tmp_path,
        "preset.yaml",
        "speculation: {selector: {strategy: {drafter: eagle, depth: 3, num_draft_tokens: 4, sampled: false}}}",
    )
    off = load_config(preset, overrides=["speculation.selector.strategy.drafter=off"])
    assert off.speculation.strategies == (StrategyConfig(),)
    deeper = load_config(preset, overrides=["speculation.selector.strategy={depth: 5, num_draft_tokens: 6}"])
    assert deeper.speculation.strategies[0].drafter == "eagle" and not deeper.speculation.strategies[0].sampled


def test_a_key_of_another_variant_says_so() -> None:
    text = mistake("rollout.engine.type=sglang", "rollout.engine.threads=9")
    assert "rollout.engine.threads belongs to type native, but rollout.engine.type is sglang" in text


def test_an_unknown_variant_lists_the_known_ones() -> None:
    text = mistake("rollout.engine.type=natve")
    assert "rollout.engine.type = 'natve' must be one of native, sglang; did you mean native?" in text


def test_variant_tags_do_not_appear_in_paths() -> None:
    assert mistake("rollout.engine.max_running=0").startswith("rollout.engine.max_running = 0 must be greater")
    assert mistake("speculation.selector.type=beg_mab").startswith("speculation.selector.buckets is missing")
    text = mistake("speculation.selector={type: beg_mab, buckets: [{strategies: [{drafter: egle}]}]}")
    assert text.startswith("speculation.selector.buckets.0.strategies.0.drafter = 'egle' must be")
    assert "did you mean eagle?" in text


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("rollout.groupsize=4", "rollout.group_size"),
        ("group_size=4", "rollout.group_size"),
        ("rolout.group_size=4", "rollout"),
        ("policy.temperature=1", "rollout.sampling.temperature"),
        ("speculation.topk=2", "speculation.selector.strategy.topk"),
        ("data.source.term={}", "data.source.terms"),
    ],
)
def test_did_you_mean(override: str, meant: str) -> None:
    text = mistake(override)
    assert text.startswith(f"unknown key {override.partition('=')[0].removesuffix('.group_size')}; did you mean ")
    assert meant in text


# Paths through the default variants, where a mistaken neighbour can stand; a key inside a list has no dotted path, one
# of two letters ("tp", "id") is not to be recognised by one of them, and of a section that another variant alone has
# ("graphs") the section itself is the unknown key.
REAL_KEYS = sorted(
    path
    for _, path in all_keys()
    if not any(part in path for part in (".buckets", ".slots", ".selector.strategies", ".graphs."))
    and not path.endswith((".type", ".path", ".on_bad_row", ".epsilon", ".window", ".tp", ".id"))
)


@given(data=st.data())
def test_one_wrong_character_is_recognised(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(REAL_KEYS))
    parent, _, key = path.rpartition(".")
    at = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from(string.ascii_lowercase + "_"))
    typo = data.draw(
        st.sampled_from([key[:at] + key[at + 1 :], key[:at] + letter + key[at + 1 :], key[:at] + letter + key[at:]])
    )
    wrong = f"{parent}.{typo}" if parent else typo
    assume(typo and wrong not in {full for _, full in all_keys()})
    text = mistake(f"{wrong}=1")
    assert f"unknown key {wrong}; did you mean" in text
    assert path in text.replace("?", " ").split(), text


def test_all_mistakes_at_once_with_where_they_came_from(tmp_path: Path) -> None:
    preset = written(
        tmp_path, "preset.yaml", "run: {steps: 0, stps: 3}\npolicy: {algorithm: {type: grpo, aggregation: tokens}}"
    )
    lines = mistake("rollout.group_size=four", files=(preset,)).splitlines()
    assert lines[0] == "4 mistakes in the configuration:"
    assert all(line.endswith((f"[{preset}]", "[command line]")) for line in lines[1:])
    assert any("run.stps" in line and "run.steps" in line for line in lines)
    assert any("run.steps = 0 must be greater than or equal to 1" in line for line in lines)
    assert any(
        "policy.algorithm.aggregation = 'tokens' must be 'token', 'sequence' or 'constant'" in line for line in lines
    )
    last = next(line for line in lines if "rollout.group_size = 'four' must be a valid integer" in line)
    assert last.endswith("[command line]")


def test_a_typo_is_not_also_blamed_on_the_default_it_left() -> None:
    """max_len misspelt leaves the default max_len, which would not fit max_tokens: one mistake, not two."""
    assert "max_tokens" not in mistake("rollout.engine.maxlen=4000", "rollout.sampling.max_tokens=3000")


@pytest.mark.parametrize("value", ["true", "1.5", "four", "[1]", "{a: 1}", "null", ".inf"])
def test_wrong_types_are_refused(value: str) -> None:
    assert mistake(f"rollout.group_size={value}").startswith("rollout.group_size = ")


@pytest.mark.parametrize("value", [".nan", ".inf", "-1", "0", "true", "fast"])
def test_learning_rate_is_a_positive_finite_number(value: str) -> None:
    assert mistake(f"policy.learning_rate={value}").startswith("policy.learning_rate = ")


@pytest.mark.parametrize("override", ["rollout.group_size", "=4", "rollout.=4", "a..b=1", "rollout group=1", "1=2"])
def test_malformed_overrides(override: str) -> None:
    assert "not of the form section.key=value" in mistake(override)


def test_contradicting_overrides() -> None:
    assert "contradicts an earlier one" in mistake("rollout=3", "rollout.group_size=4")
    assert mistake("rollout=3").startswith("rollout = 3 must be a mapping of keys to values")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run: {steps: 1}\nrun: {seed: 2}", "line 2, column 1: not valid YAML: key 'run' appears twice"),
        ("run:\n  steps: 1\n  steps: 2", "line 3, column 3: not valid YAML: key 'steps' appears twice"),
        ("- run", "a configuration is a mapping of sections, not a list"),
        ("pocket", "a configuration is a mapping of sections, not the value 'pocket'"),
        ("run: [", "line 1, column 7: not valid YAML"),
        ("1: 2", "key 1 is not text"),
        ("run: &r {name: *r}", "contains itself"),
        ("run: !!python/object/apply:os.system [id]", "not valid YAML: could not determine a constructor"),
        ("---\nrun: {}\n---\nrun: {}", "not valid YAML"),
    ],
)
def test_unusable_files(tmp_path: Path, text: str, reason: str) -> None:
    path = written(tmp_path, "bad.yaml", text)
    told = mistake(files=(path,))
    assert told.startswith(str(path)) and reason in told


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "empty.yaml", "# nothing yet\n")) == ClusterConfig()


def test_a_missing_file_lists_the_presets(tmp_path: Path) -> None:
    written(tmp_path, "one.yaml", "run: {steps: 11}")
    written(tmp_path, "two.yaml", "{}")
    with pytest.raises(ConfigError, match=r"cannot read configuration 'three': No such file.*presets: one, two"):
        load_config("three", presets_dir=tmp_path)
    assert load_config("one", presets_dir=tmp_path).run.steps == 11


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in mistake(files=(path,))
    assert "Is a directory" in mistake(files=(tmp_path,))


# ------------------------------------------------------------------ impossible combinations


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        (["rollout.sampling.max_tokens=9000"], "does not fit rollout.engine.max_len = 768", "raise max_len to 9256"),
        (["rollout.group_size=64"], "exceeds rollout.engine.max_running 32", "raise max_running or lower group_size"),
        (["rollout.group_size=1"], "group-relative advantages", "rollout.group_size >= 2"),
        (["rollout.sampling.temperature=0"], "varied rollouts", "temperature above 0"),
        (["speculation.acceptance=threshold"], "change the sampling distribution", "speculation.allow_lossy: true"),
        (["speculation.accept_threshold=0.9"], "change the sampling distribution", "speculation.allow_lossy: true"),
        (
            [
                "drafter.method=eagle3",
                "speculation.selector.strategy={drafter: eagle, depth: 3, num_draft_tokens: 4}",
            ],
            "native engine does not run EAGLE-3",
            "drafter.method: eagle3 needs rollout.engine.type: sglang",
        ),
        (["drafter.aux_layers=[1, 2, 3]"], "reads the last hidden state only", "leave aux_layers out"),
        (["drafter.method=eagle3", "drafter.aux_layers=[1, 2]"], "three different ids", "rising order"),
        (["drafter.method=eagle3", "drafter.aux_layers=[3, 2, 5]"], "three different ids", "rising order"),
        (["drafter.method=eagle3", "drafter.aux_layers=[-1, 2, 5]"], "three different ids", "from 0 up"),
        (["data.chat_template=true"], "no chat template", "data.chat_template: false"),
        (["model.device=cuda"], "Ray hides the GPUs", "placement.gpus_per_slot"),
        (["placement.mode=local", "placement.address=auto"], "names a Ray cluster", "placement.mode: ray"),
        (["data.source.terms={min: 50}"], "min 50 exceeds max 40", "swap them"),
        (["speculation.selector.strategy.drafter=eagle"], "needs depth >= 1", "depth >= 1"),
        (
            ["speculation.selector.strategy={drafter: eagle, depth: 3}"],
            "a chain (topk 1) verifies depth + 1",
            "set num_draft_tokens to 4",
        ),
        (
            ["speculation.selector.strategy={drafter: suffix, depth: 3, topk: 2, num_draft_tokens: 8}"],
            "proposes chains",
            "set topk to 1",
        ),
        (
            ["speculation.selector.strategy={drafter: hybrid, depth: 4, num_draft_tokens: 4}"],
            "chains of at least its depth",
            "num_draft_tokens to 5 or more",
        ),
        (
            ["speculation.selector.strategy={drafter: eagle, depth: 2, num_draft_tokens: 3, budget: 3}"],
            "shares out the tokens of EAGLE chains",
            "at most the depth",
        ),
        (["speculation.selector.strategy.depth=2"], "drafts nothing", "leave depth and num_draft_tokens out"),
        (
            ["speculation.selector={type: beg_mab, buckets: [{min_running: 2, strategies: [{}]}]}"],
            "must start at min_running 1",
            "grow strictly",
        ),
    ],
)
def test_impossible_combinations_say_the_remedy(overrides: list[str], problem: str, remedy: str) -> None:
    text = mistake(*overrides)
    assert problem in text and remedy in text


def test_every_impossible_combination_is_told() -> None:
    lines = mistake("rollout.group_size=1", "rollout.sampling.temperature=0").splitlines()
    assert lines[0] == "2 mistakes in the configuration:" and len(lines) == 3


def test_eagle3_runs_on_sglang_and_warms_up_anywhere() -> None:
    chain = "speculation.selector.strategy={drafter: eagle, depth: 3, num_draft_tokens: 4}"
    config = load_config(
        overrides=[
            "drafter={method: eagle3, aux_layers: [0, 2, 5]}",
            "rollout.engine.type=sglang",
            "placement={gpus_per_slot: 1, policy_gpus: 1}",
            chain,
        ]
    )
    assert config.drafter.aux_layers == (0, 2, 5)
    assert load_config(overrides=["drafter.method=eagle3"]), "no strategy drafts with it: nothing the engine must run"


def test_a_lossy_mode_runs_when_asked_for() -> None:
    assert load_config(overrides=["speculation.accept_threshold=0.9", "speculation.allow_lossy=true"])
