"""The SGLang engine of one slot, from the configuration: everything is checked before the engine is started."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.config.schema import ClusterConfig, SGLangEngine
from services.core.errors import ConfigError
from services.models.device import capability
from services.models.drafter import DrafterMethod
from services.models.files import model_dir, read_config
from services.models.layers import ModelSpec, model_spec
from services.models.methods import drafter_folder, drafter_method
from services.models.target import target_names
from services.models.tokenizer import load_tokenizer
from services.rollout.sglang.arguments import engine_arguments, reserved_tokens
from services.rollout.sglang.attention import pick_attention
from services.rollout.sglang.engine import SGLangEngine as Adapter
from services.rollout.sglang.engine import SGLangLimits, Shapes
from services.rollout.sglang.handle import EngineHandle, Kind
from services.rollout.sglang.order import strategies_by_depth, switch_order
from services.speculation.strategy import DraftStrategy

Start = Callable[[Mapping[str, Any], str, ClusterConfig], EngineHandle]
# The engine gives up before the coordinator does: its message says what it waited for.
SOONER = 0.9


def start_sglang(arguments: Mapping[str, Any], server: str, config: ClusterConfig) -> EngineHandle:
    """The real thing; imported here, so that machines without SGLang load the rest."""
    from services.rollout.sglang.launch import SGLangHandle
    from services.rollout.sglang.start import start_engine

    engine = config.rollout.engine
    assert isinstance(engine, SGLangEngine)
    started = start_engine(arguments, server, SOONER * config.coordinator.start_timeout_s)
    timeout_s = SOONER * config.coordinator.call_timeout_s
    return SGLangHandle(started, server, engine.tp, engine.deterministic, timeout_s)


def build_sglang_engine(config: ClusterConfig, engine: SGLangEngine, slot: int, start: Start = start_sglang) -> Adapter:
    """Raises ConfigError when strategy, drafter folder and model do not go together (row 25)."""
    arguments, server = slot_arguments(config, engine, slot), f"rollout-{slot}"
    spec, strategies = model_spec(read_config(model_dir(config.model.path))), strategies_by_depth(config.speculation)
    method = drafter_method(config.drafter, spec)
    shapes = _shapes(spec, _deepest(config), method)
    capture_bytes = engine.capture_bytes if config.drafter.states == "engine" else 0
    limits = SGLangLimits(engine.max_len, spec.vocab_size, shapes, method.engine_zeros(), server, capture_bytes)
    tokenizer = load_tokenizer(config.model.path)
    return Adapter(start(arguments, server, config), limits, strategies, tokenizer.decode, time.monotonic)


def slot_arguments(config: ClusterConfig, engine: SGLangEngine, slot: int) -> dict[str, Any]:
    """Keyword arguments of the slot's `sglang.Engine`, checked."""
    folder, strategy = model_dir(config.model.path), _deepest(config)
    model_config, start = read_config(folder), drafter_folder(config)
    seed = (config.run.seed * 1009 + slot) % 2**31
    spec, strategies = model_spec(model_config), strategies_by_depth(config.speculation).values()
    attention = pick_attention(engine, capability(), config.model.dtype, spec.head_dim, strategies)
    engine = engine.model_copy(update={"attention_backend": attention})
    order = switch_order(config, engine, slot)
    arguments = engine_arguments(config, engine, strategy, (folder, model_config), start, seed, order)
    if strategy.drafter == "eagle":
        method = drafter_method(config.drafter, spec)
        _check_drafter_folder(method, start, engine.max_len + reserved_tokens(strategy))
        _check_sampled(method, strategy)
    return arguments


def _deepest(config: ClusterConfig) -> DraftStrategy:
    strategies = strategies_by_depth(config.speculation)
    return strategies[max(strategies)]


def _shapes(spec: ModelSpec, strategy: DraftStrategy, method: DrafterMethod) -> dict[Kind, Shapes]:
    shapes: dict[Kind, Shapes] = {"policy": target_names(spec)}
    if strategy.drafter == "eagle":
        shapes["drafter"] = method.names()
    return shapes


def _check_sampled(method: DrafterMethod, strategy: DraftStrategy) -> None:
    """Rejection sampling compares distributions over the target's tokens, and a head of the drafter's own has others:
    nobody has seen SGLang bring the two together."""
    if strategy.sampled and method.draft_ids is not None:
        raise ConfigError(
            f"the drafter has an LM head of its own, over {len(method.draft_ids)} tokens: SGLang verifies its drafts "
            "by argmax only; set sampled: false in every strategy of speculation.selector"
        )


def _check_drafter_folder(method: DrafterMethod, folder: Path, context: int) -> None:
    """SGLang itself would take an EAGLE drafter for an EAGLE-3 one and accept nothing, silently; one that ends before
    `context` it refuses, after the target is loaded."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"no drafter at {folder}: `longtail warmup` makes one beside the model; or set "
            "speculation.selector.strategy.drafter: off"
        )
    found = read_config(folder)
    problems = list(method.config_problems(found))
    if (positions := int(found.get("max_position_embeddings", context))) < context:
        problems.append(
            f"has max_position_embeddings {positions}, and a rollout of rollout.engine.max_len takes {context} with "
            "its draft tokens: lower max_len"
        )
    if problems:
        raise ConfigError("\n".join(f"{folder / 'config.json'} {problem}" for problem in problems))
