"""From the configuration to what SGLang is started with and asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.drafter import DrafterConfig
from services.config.schema import (
    ClusterConfig,
    DataConfig,
    ModelConfig,
    PlacementConfig,
    RolloutConfig,
    RolloutSampling,
    SGLangEngine,
)
from services.config.speculation import FixedSelector, SpeculationConfig, StrategyConfig
from services.core.errors import ConfigError
from services.core.types import SamplingParams
from services.rollout.sglang.arguments import engine_arguments, reserved_tokens, sampling_arguments
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy
from tests.services.rollout.engines import strategy

CHAIN, ARGMAX = strategy("eagle", 3), strategy("eagle", 3, sampled=False)
TREE = strategy("eagle", 3, 4, 9, sampled=False)
NGRAM = strategy("ngram", 5, 3, 12)


def config_of(s: DraftStrategy = OFF, method: str = "eagle", dtype: str = "bfloat16", **engine: Any) -> ClusterConfig:
    chosen = StrategyConfig(
        drafter=s.drafter, depth=s.depth, topk=s.topk, num_draft_tokens=s.num_draft_tokens, sampled=s.sampled
    )
    return ClusterConfig(
        model=ModelConfig(path="x", dtype=dtype),  # type: ignore[arg-type]
        data=DataConfig(max_prompt_tokens=32),
        rollout=RolloutConfig(
            engine=SGLangEngine(**({"max_len": 128} | engine)), group_size=2, sampling=RolloutSampling(max_tokens=64)
        ),
        speculation=SpeculationConfig(selector=FixedSelector(strategy=chosen)),
        drafter=DrafterConfig(method=method),  # type: ignore[arg-type]
        placement=PlacementConfig(gpus_per_slot=engine.get("tp", 1), policy_gpus=1),
    )


def arguments_of(
    s: DraftStrategy = OFF, method: str = "eagle", positions: int | None = 4096, dtype: str = "bfloat16", **engine: Any
) -> dict[str, Any]:
    config = config_of(s, method, dtype, **engine)
    assert isinstance(config.rollout.engine, SGLangEngine)
    model = {} if positions is None else {"max_position_embeddings": positions}
    return engine_arguments(config, config.rollout.engine, s, (Path("/m/target"), model), Path("/m/drafter"), 77)


def speculative(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k.removeprefix("speculative_"): v for k, v in arguments.items() if k.startswith("speculative_")}


def test_off_has_no_speculative_argument() -> None:
    assert speculative(arguments_of(OFF)) == {}


@pytest.mark.parametrize(("method", "name"), [("eagle", "EAGLE"), ("eagle3", "EAGLE3")])
@pytest.mark.parametrize(
    ("s", "rejection"), [(CHAIN, True), (ARGMAX, False), (TREE, False)], ids=["sampled", "argmax", "tree"]
)
def test_eagle_and_eagle3_by_the_drafters_method(method: str, name: str, s: DraftStrategy, rejection: bool) -> None:
    """Sampled drafts are verified by rejection against the drafter's distribution, argmax ones by SGLang's rule."""
    assert speculative(arguments_of(s, method)) == {
        "algorithm": name,
        "draft_model_path": "/m/drafter",
        "num_steps": s.depth,
        "eagle_topk": s.topk,
        "num_draft_tokens": s.num_draft_tokens,
        "use_rejection_sampling": rejection,
    }


def test_ngrams_need_no_drafter() -> None:
    assert speculative(arguments_of(NGRAM)) == {
        "algorithm": "NGRAM", "num_steps": 5, "num_draft_tokens": 12, "ngram_max_bfs_breadth": 3
    }  # fmt: skip


def test_what_the_engine_is_started_with() -> None:
    found = arguments_of(tp=2, max_running=48, mem_fraction=0.4, attention_backend="fa3", stream_interval=8)
    assert found | {
        "model_path": "/m/target", "dtype": "bfloat16", "tp_size": 2, "max_running_requests": 48,
        "cuda_graph_max_bs_decode": 48, "mem_fraction_static": 0.4, "attention_backend": "fa3", "stream_interval": 8,
        "random_seed": 77, "skip_tokenizer_init": True, "load_format": "auto", "enable_memory_saver": False,
        "enable_deterministic_inference": False,
    } == found  # fmt: skip
    assert "max_total_tokens" not in found, "whatever the memory leaves"
    assert arguments_of(kv_tokens=5000)["max_total_tokens"] == 5000
    assert arguments_of(deterministic=True)["enable_deterministic_inference"] is True


def test_row_65_gpu_ids_count_from_zero_within_what_ray_shows() -> None:
    """Ray sets CUDA_VISIBLE_DEVICES for a slot's actor; the machine's own numbers would point outside it."""
    assert all(arguments_of(tp=tp)["base_gpu_id"] == 0 for tp in (1, 2, 4))


def test_row_24_memory_that_is_released_keeps_its_weights_on_the_host() -> None:
    found = arguments_of(CHAIN, release_memory=True)
    assert (
        found["enable_memory_saver"] and found["enable_weights_cpu_backup"] and found["enable_draft_weights_cpu_backup"]
    )


def test_dummy_weights_are_for_drafter_and_target() -> None:
    assert speculative(arguments_of(CHAIN, load_format="dummy"))["draft_load_format"] == "dummy"
    assert speculative(arguments_of(OFF, load_format="dummy")) == {}
    assert arguments_of(OFF, load_format="dummy")["load_format"] == "dummy"


def test_a_server_without_work_leaves_its_core_to_others() -> None:
    assert arguments_of()["sleep_on_idle"] and not arguments_of(engine_args={"sleep_on_idle": False})["sleep_on_idle"]


def test_further_arguments_are_handed_on() -> None:
    found = arguments_of(engine_args={"chunked_prefill_size": 2048, "log_level": "info"})
    assert found["chunked_prefill_size"] == 2048 and found["log_level"] == "info"


# ------------------------------------------------------------------ lengths


@pytest.mark.parametrize(("s", "more"), [(OFF, 2), (CHAIN, 4), (TREE, 12), (NGRAM, 15), (strategy("eagle", 1), 2)])
def test_the_context_has_room_for_the_draft_tokens(s: DraftStrategy, more: int) -> None:
    """SGLang counts a verify step's tokens in: max_len alone would refuse a request that fills it."""
    assert reserved_tokens(s) == more
    assert arguments_of(s)["context_length"] == 128 + more
    assert arguments_of(s, positions=128 + more)["context_length"] == 128 + more
    with pytest.raises(ConfigError, match=rf"max_position_embeddings {127 + more}: lower max_len to 127"):
        arguments_of(s, positions=127 + more)


@given(depth=st.integers(1, 8), topk=st.integers(1, 8), nodes=st.integers(1, 64))
def test_requests_that_fill_max_len_pass_sglangs_own_checks(depth: int, topk: int, nodes: int) -> None:
    """Its tokenizer process refuses input + new + reserved > context for EAGLE; its scheduler shortens new tokens to
    context - input - 2 for everybody."""
    s = draft_strategy(
        StrategyConfig(
            drafter="eagle", depth=depth, topk=topk, sampled=False,
            num_draft_tokens=depth + 1 if topk == 1 else max(nodes, topk + 1),
        )
    )  # fmt: skip
    context = arguments_of(s)["context_length"]
    for prompt in (1, 32, 127):
        new = 128 - prompt
        assert prompt + new + max(s.topk * s.depth, s.num_draft_tokens) <= context
        assert new <= (context - 1) - prompt - 1


def test_a_model_that_does_not_say_its_positions_is_believed() -> None:
    assert arguments_of(positions=None)["context_length"] == 130


# ------------------------------------------------------------------ sampling


def test_sampling_in_sglangs_words() -> None:
    sampling = SamplingParams(temperature=0.7, max_tokens=50, stop_token_ids=(2, 9))
    plain = {"temperature": 0.7, "max_new_tokens": 50, "stop_token_ids": [2, 9]}
    assert sampling_arguments(sampling, 5, False) == plain
    assert sampling_arguments(sampling, 2**31 + 5, True) == plain | {"sampling_seed": 5}


def test_stop_strings_are_looked_for_at_every_token_and_never_sent() -> None:
    found = sampling_arguments(SamplingParams(stop_strings=("#",)), 0, False)
    assert found["stream_interval"] == 1 and "stop" not in found
