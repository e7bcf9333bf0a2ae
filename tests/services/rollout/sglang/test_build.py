"""The engine of a slot as the configuration builds it, over a fake engine in SGLang's place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.config.drafter import DrafterConfig
from services.config.schema import (
    ClusterConfig,
    DataConfig,
    ModelConfig,
    PlacementConfig,
    RolloutConfig,
    RolloutSampling,
    RunConfig,
    SGLangEngine,
)
from services.config.speculation import AdaptiveSelector, FixedSelector, SpeculationConfig, StrategyConfig, eagle_chain
from services.core.errors import ConfigError, DataError
from services.core.types import SamplingParams, ServedVersions
from services.drafter.export import write_drafter_folder
from services.models.eagle3 import Eagle3
from services.models.methods import drafter_method
from services.models.tokenizer import character_tokenizer
from services.rollout.service import build_rollout_service
from services.rollout.sglang.build import build_sglang_engine, slot_arguments
from services.rollout.sglang.engine import SGLangEngine as Adapter
from services.rollout.sglang.order import parse_order, switch_order
from services.speculation.strategy import draft_strategy
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import check_all, group
from tests.services.rollout.sglang.fake import FakeHandle

CHARACTERS = "abcdefghijklmnopqrstuvwxyz=#"
MODEL = tiny_model("llama", 32, 0, 2.0, num_hidden_layers=4)
EAGLE = StrategyConfig(drafter="eagle", depth=2, num_draft_tokens=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    MODEL.save_pretrained(path)
    character_tokenizer(CHARACTERS).save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    write_drafter(path, "eagle")
    return path


def write_drafter(folder: Path, method: str, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    drafter = folder.parent / "drafter"
    drafter.mkdir(exist_ok=True)
    made = drafter_method(DrafterConfig(method=method), spec_of(MODEL)).folder_config(config)  # type: ignore[arg-type]
    (drafter / "config.json").write_text(json.dumps(made | changes))


def config_of(folder: Path, strategy: StrategyConfig = EAGLE, method: str = "eagle", seed: int = 0) -> ClusterConfig:
    return ClusterConfig(
        model=ModelConfig(path=str(folder)),
        data=DataConfig(max_prompt_tokens=16),
        rollout=RolloutConfig(engine=SGLangEngine(max_len=64), group_size=2, sampling=RolloutSampling(max_tokens=16)),
        speculation=SpeculationConfig(selector=FixedSelector(strategy=strategy)),
        drafter=DrafterConfig(method=method),  # type: ignore[arg-type]
        placement=PlacementConfig(mode="local"),
        run=RunConfig(seed=seed),
    )


def engine_of(config: ClusterConfig) -> SGLangEngine:
    assert isinstance(config.rollout.engine, SGLangEngine)
    return config.rollout.engine


class Starts:
    """Starts the fake, and keeps what it was asked to start."""

    def __init__(self) -> None:
        self.seen: list[tuple[Mapping[str, Any], str]] = []

    def __call__(self, arguments: Mapping[str, Any], server: str, config: ClusterConfig) -> FakeHandle:
        self.seen.append((arguments, server))
        return FakeHandle(MODEL, draft_strategy(config.speculation.strategies[0]))


def build(config: ClusterConfig, slot: int = 0, starts: Starts | None = None) -> Adapter:
    return build_sglang_engine(config, engine_of(config), slot, starts or Starts())


@pytest.mark.parametrize(
    "strategy", [EAGLE, StrategyConfig(), StrategyConfig(drafter="ngram", depth=2, num_draft_tokens=3)]
)
def test_a_built_engine_serves(folder: Path, strategy: StrategyConfig) -> None:
    starts = Starts()
    engine = build(config_of(folder, strategy), 3, starts)
    engine.load_policy(0, tensors_of(MODEL))
    if strategy.drafter == "eagle":
        engine.load_drafter(0, random_drafter(spec_of(MODEL)))
    assert engine.versions == ServedVersions(0, 0 if strategy.drafter == "eagle" else None)
    engine.submit([group((1, 5, 9), 2, SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(2,)))])
    found = {}
    while engine.num_running or engine.num_waiting:
        found |= {r.rollout_id: r for r in engine.step(0.0)}
    check_all(MODEL, found)
    spelled = {i + 4: c for i, c in enumerate(CHARACTERS)}
    for r in found.values():
        assert r.server == "rollout-3" and r.text == "".join(spelled[i] for i in r.response_ids if i > 3)
    ((arguments, _),) = starts.seen
    assert arguments == slot_arguments(config_of(folder, strategy), engine_of(config_of(folder, strategy)), 3)
    assert arguments["model_path"] == str(folder) and arguments["context_length"] > 64


def test_row_66_names_and_seeds_differ_by_slot(folder: Path) -> None:
    starts = Starts()
    for seed in (0, 1):
        for slot in range(4):
            build(config_of(folder, seed=seed), slot, starts)
    assert [server for _, server in starts.seen[:4]] == [f"rollout-{n}" for n in range(4)]
    seeds = [arguments["random_seed"] for arguments, _ in starts.seen]
    assert len(set(seeds)) == 8 and all(0 <= s < 2**31 for s in seeds)
    assert slot_arguments(config_of(folder, seed=2**40), engine_of(config_of(folder)), 1)["random_seed"] < 2**31
    others = [{k: v for k, v in arguments.items() if k != "random_seed"} for arguments, _ in starts.seen]
    assert all(o == others[0] for o in others), "no port or other name is chosen here"


def test_a_drafter_with_a_head_of_its_own_drafts_by_argmax_only(folder: Path, tmp_path: Path) -> None:
    """It starts from drafter.path, with shapes that include its head; sampled drafts are refused."""
    method = Eagle3(spec_of(MODEL), (0, 1, 2), (1, 5, 9, 30))
    own = tmp_path / "own"
    config = json.loads((folder / "config.json").read_text())
    write_drafter_folder(random_drafter(method.target, method=method), method, config, own)
    argmax = StrategyConfig(drafter="eagle", depth=2, num_draft_tokens=3, sampled=False)
    for strategy in (argmax, EAGLE):
        made = config_of(folder, strategy, "eagle3").model_copy(
            update={"drafter": DrafterConfig(method="eagle3", path=own)}
        )
        if strategy.sampled:
            with pytest.raises(ConfigError, match=r"LM head of its own, over 4 tokens.*set sampled: false"):
                slot_arguments(made, engine_of(made), 0)
        else:
            arguments = slot_arguments(made, engine_of(made), 0)
            assert arguments["speculative_draft_model_path"] == str(own)
    assert method.names()["lm_head.weight"] == (4, 32)


@pytest.mark.parametrize(
    ("made_for", "changes", "method", "said"),
    [
        ("eagle3", {}, "eagle", r"needs \['LlamaForCausalLMEagle'\]: set drafter.method to the one"),
        ("eagle", {}, "eagle3", r"needs \['LlamaForCausalLMEagle3'\]: set drafter.method to the one"),
        ("eagle", {"architectures": None}, "eagle", "has architectures None"),
        ("eagle", {"hidden_size": 64}, "eagle", "has hidden_size 64, the target has 32"),
        ("eagle", {"vocab_size": 31}, "eagle", "has vocab_size 31, the target has 32"),
        ("eagle3", {"draft_vocab_size": 16}, "eagle3", "has draft_vocab_size 16"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "eagle3", "reads target layers"),
    ],
)
def test_row_25_a_drafter_that_does_not_belong_is_an_error_not_acceptance_one(
    folder: Path, made_for: str, changes: dict[str, object], method: str, said: str
) -> None:
    write_drafter(folder, made_for, **changes)
    starts = Starts()
    with pytest.raises(ConfigError, match=said) as caught:
        build(config_of(folder, method=method), 0, starts)
    assert str(folder.parent / "drafter" / "config.json") in str(caught.value) and not starts.seen
    assert build(config_of(folder, StrategyConfig(), method=method)), "without speculation nobody reads it"


def test_a_missing_drafter_says_how_to_get_one(folder: Path) -> None:
    (folder.parent / "drafter" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no drafter at .*drafter: `longtail warmup` makes one.*drafter: off"):
        build(config_of(folder))


def test_a_damaged_drafter_config_names_the_file(folder: Path) -> None:
    (folder.parent / "drafter" / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*drafter/config\.json"):
        build(config_of(folder))


def test_a_drafter_inside_the_models_folder_comes_first(folder: Path) -> None:
    inside = folder / "drafter"
    inside.mkdir()
    (inside / "config.json").write_text((folder.parent / "drafter" / "config.json").read_text())
    assert slot_arguments(config_of(folder), engine_of(config_of(folder)), 0)["speculative_draft_model_path"] == str(
        inside
    )


def test_a_drafter_with_fewer_positions_than_a_rollout_takes_is_refused_before_the_start(folder: Path) -> None:
    write_drafter(folder, "eagle", max_position_embeddings=66)
    starts = Starts()
    with pytest.raises(ConfigError, match=r"drafter/config\.json has max_position_embeddings 66, .* takes 67 .* lower"):
        build(config_of(folder), starts=starts)
    assert starts.seen == []
    write_drafter(folder, "eagle", max_position_embeddings=67)
    build(config_of(folder), starts=starts)


def test_max_len_beyond_the_models_positions(folder: Path) -> None:
    config = config_of(folder)
    wide = config.model_copy(update={"rollout": RolloutConfig(engine=SGLangEngine(max_len=256))})
    with pytest.raises(ConfigError, match="max_position_embeddings 256: lower max_len to 253"):
        build(wide)


def test_eagle3_on_a_shallow_target(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"the target has 2 layers: set drafter\.method: eagle"):
        build(config_of(folder, method="eagle3"))


def test_the_rollout_server_is_built_this_way(folder: Path) -> None:
    write_drafter(folder, "eagle3")
    with pytest.raises(ConfigError, match=r"set drafter\.method"):
        build_rollout_service(config_of(folder), 0)


# ------------------------------------------------------------------ several strategies

SEVERAL = AdaptiveSelector(strategies=(EAGLE, eagle_chain(4), eagle_chain(1)))


def test_an_engine_that_switches_starts_with_the_deepest_chain_and_an_order(folder: Path) -> None:
    config = config_of(folder)
    config = config.model_copy(update={"speculation": SpeculationConfig(selector=SEVERAL)})
    arguments = slot_arguments(config, engine_of(config), 3)
    assert arguments["speculative_adaptive"] is True and arguments["speculative_num_steps"] == 4
    assert arguments["speculative_num_draft_tokens"] == 5 and arguments["speculative_eagle_topk"] == 1
    assert arguments["speculative_use_rejection_sampling"] is True, "drafts are sampled at every depth"
    assert arguments["context_length"] == 64 + 5, "room for the deepest"
    order = parse_order(arguments["speculative_adaptive_config"])
    assert order == switch_order(config, engine_of(config), 3) and order is not None
    assert order.pool.depths == (0, 1, 2, 4) and order.server == "rollout-3"


@pytest.mark.parametrize(("gpu", "attention"), [(None, "triton"), ((9, 0), "fa3"), ((8, 0), "triton")])
def test_sglang_is_told_which_attention_to_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: tuple[int, int] | None, attention: str
) -> None:
    """Never `auto`: left to itself it takes what no test of ours has run with."""
    monkeypatch.setattr("services.rollout.sglang.build.capability", lambda: gpu)
    monkeypatch.setattr("services.rollout.sglang.attention.HEAD_DIMS", (spec_of(MODEL).head_dim,))
    config = config_of(folder)
    config = config.model_copy(update={"model": ModelConfig(path=str(folder), dtype="bfloat16")})
    assert slot_arguments(config, engine_of(config), 0)["attention_backend"] == attention


def test_one_chain_does_not_switch(folder: Path) -> None:
    arguments = slot_arguments(config_of(folder), engine_of(config_of(folder)), 0)
    assert not {"speculative_adaptive", "speculative_adaptive_config"} & arguments.keys()
