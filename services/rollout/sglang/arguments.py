"""From the configuration to the keyword arguments of `sglang.Engine` 0.5.17: pure, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.config.schema import ClusterConfig, SGLangEngine
from services.core.errors import ConfigError
from services.core.types import SamplingParams
from services.rollout.sglang.order import CONFIG_FILE, SwitchOrder
from services.speculation.strategy import DraftStrategy

ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3"}


def engine_arguments(
    config: ClusterConfig,
    engine: SGLangEngine,
    strategy: DraftStrategy,
    model: tuple[Path, Mapping[str, Any]],
    drafter_folder: Path,
    seed: int,
    order: SwitchOrder | None = None,
) -> dict[str, Any]:
    """`model`: the target's folder and its config.json. `strategy`: the deepest, with an `order` to switch; that one's
    text stands in for the file into which it goes at the start. `engine`: with its attention picked. Raises ConfigError
    when the model cannot hold `max_len`."""
    folder, model_config = model
    context = engine.max_len + reserved_tokens(strategy)
    positions = int(model_config.get("max_position_embeddings", context))
    if context > positions:
        raise ConfigError(
            f"rollout.engine.max_len {engine.max_len} and {context - engine.max_len} places for draft tokens exceed "
            f"the model's max_position_embeddings {positions}: lower max_len to {positions - context + engine.max_len}"
        )
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,  # token-in/token-out: text is never made into ids again (row 53)
        "dtype": config.model.dtype,
        "load_format": engine.load_format,
        "tp_size": engine.tp,
        "base_gpu_id": 0,  # ids count from 0 within CUDA_VISIBLE_DEVICES, which Ray sets (row 65)
        "context_length": context,
        "max_running_requests": engine.max_running,
        "cuda_graph_max_bs_decode": engine.max_running,
        "mem_fraction_static": engine.mem_fraction,
        "attention_backend": engine.attention_backend,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "schedule_policy": "lpm",  # rollouts of one prompt queue behind its first, and share it
        "stream_interval": engine.stream_interval,
        "sleep_on_idle": True,  # else a server without work keeps a core busy that others want
        "enable_deterministic_inference": engine.deterministic,
        "enable_memory_saver": engine.release_memory,
        "enable_weights_cpu_backup": engine.release_memory,
        "enable_draft_weights_cpu_backup": engine.release_memory,
        "disable_prefill_cuda_graph": True,
        "random_seed": seed,
        "log_level": "warning",
        **speculation_arguments(strategy, config.drafter.method, drafter_folder),
        **engine.engine_args,
    }
    if engine.load_format == "dummy" and strategy.drafter == "eagle":
        arguments["speculative_draft_load_format"] = "dummy"
    if order is not None:
        arguments |= {"speculative_adaptive": True, CONFIG_FILE: order.text()}
    if engine.kv_tokens is not None:
        arguments["max_total_tokens"] = engine.kv_tokens
    return arguments


def reserved_tokens(strategy: DraftStrategy) -> int:
    """Positions that SGLang keeps free behind prompt and response: one verify step's draft tokens, and two in any case.
    Without them it would refuse, or cut short, a request that fills `max_len`."""
    return max(2, strategy.depth * strategy.topk, strategy.num_draft_tokens)


def speculation_arguments(strategy: DraftStrategy, method: str, drafter_folder: Path) -> dict[str, Any]:
    """The speculative half. A `sampled` chain is verified by rejection against the drafter's own distribution; argmax
    drafts by SGLang's default rule, which accepts with the target's probability of that one token. Both are exact."""
    if strategy.is_off:
        return {}
    if strategy.drafter == "ngram":
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_steps": strategy.depth,
            "speculative_num_draft_tokens": strategy.num_draft_tokens,
            "speculative_ngram_max_bfs_breadth": strategy.topk,
        }
    return {
        "speculative_algorithm": ALGORITHMS[method],
        "speculative_draft_model_path": str(drafter_folder),
        "speculative_num_steps": strategy.depth,
        "speculative_eagle_topk": strategy.topk,
        "speculative_num_draft_tokens": strategy.num_draft_tokens,
        "speculative_use_rejection_sampling": strategy.sampled,
    }


def sampling_arguments(sampling: SamplingParams, seed: int, deterministic: bool) -> dict[str, Any]:
    """The run's sampling in SGLang's words. Stop strings are the adapter's business, ids SGLang's. SGLang stops at the
    model's own end-of-sequence ids as well: the switch against that would switch off the other ids too."""
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.stop_strings:
        arguments["stream_interval"] = 1  # look at every token
    if deterministic:
        arguments["sampling_seed"] = seed % 2**31
    return arguments
