"""What a run works on, read and checked in the driver before anything starts."""

from __future__ import annotations

from services.config.schema import ClusterConfig
from services.coordinator.services import Inputs
from services.core.errors import DataError
from services.core.types import SamplingParams
from services.data.source import load_prompts
from services.models.files import model_dir, read_config
from services.models.layers import model_spec
from services.models.tokenizer import Tokenizer, load_tokenizer


def load_inputs(config: ClusterConfig) -> Inputs:
    """Prompts of both sides, and sampling parameters with the tokenizer's end-of-sequence ids filled in.

    Raises DataError for prompt sets and model folders that cannot be used.
    """
    tokenizer = load_tokenizer(config.model.path)
    sampling = config.rollout.sampling
    check_model(config, tokenizer)
    prompts = load_prompts(config, tokenizer)
    if config.run.compare_prompts and not prompts.heldout:
        raise DataError("run.compare_prompts needs held-out prompts: raise data.heldout_fraction")
    return Inputs(
        train=tuple(prompts.train),
        heldout=tuple(prompts.heldout),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_token_ids or tuple(tokenizer.eos_token_ids),
            stop_strings=sampling.stop_strings,
        ),
    )


def check_model(config: ClusterConfig, tokenizer: Tokenizer) -> None:
    """Raises DataError for a model that no engine runs, or whose tokenizer or context does not fit."""
    spec = model_spec(read_config(model_dir(config.model.path)))
    if tokenizer.vocab_size > spec.vocab_size:
        raise DataError(
            f"the tokenizer of {config.model.path} has {tokenizer.vocab_size} tokens, its model {spec.vocab_size}: "
            "they do not belong together; take both from one checkpoint"
        )
    if config.rollout.engine.max_len > spec.max_positions:
        raise DataError(
            f"rollout.engine.max_len {config.rollout.engine.max_len} exceeds the {spec.max_positions} positions that "
            f"{config.model.path} was made for: lower it"
        )


def needs_drafter(config: ClusterConfig) -> bool:
    """Drafter trainers are started only when a strategy drafts with the drafter. Training one that nothing uses would
    burn the idle time for a curve nobody asked for."""
    return config.speculation.learned
