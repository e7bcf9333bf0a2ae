"""What `rollout.engine.engine_args` must leave alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# Arguments of sglang.Engine that the rest of this tree decides, by how they begin.
_OWN_ENGINE_ARGS = (
    "model_path", "speculative_", "tp_size", "max_running_requests", "context_length", "mem_fraction_static",
    "max_total_tokens", "attention_backend", "enable_deterministic_inference", "random_seed", "skip_tokenizer_init",
    "stream_interval", "enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup",
    "base_gpu_id", "custom_", "load_format", "dp_size", "pp_size", "dtype",
    "preferred_sampling_params", "incremental_streaming_output",  # another distribution; news in pieces
)  # fmt: skip


def engine_arg_problems(arguments: Iterable[str]) -> Iterator[str]:
    for name in arguments:
        if name.startswith(_OWN_ENGINE_ARGS):
            yield (
                f"rollout.engine.engine_args.{name} is decided by the rest of the configuration (a lossy acceptance "
                "threshold could slip in here otherwise): remove it"
            )
