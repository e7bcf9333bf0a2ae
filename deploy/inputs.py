"""What a run works on, read and checked in the driver before anything starts."""

from __future__ import annotations

from services.config.schema import ClusterConfig
from services.coordinator.services import Inputs
from services.core.errors import DataError
from services.core.types import SamplingParams
from services.data.source import load_prompts
from services.models.tokenizer import load_tokenizer


def load_inputs(config: ClusterConfig) -> Inputs:
    """Prompts of both sides, and sampling parameters with the tokenizer's end-of-sequence ids filled in.

    Raises DataError for prompt sets and model folders that cannot be used.
    """
    tokenizer = load_tokenizer(config.model.path)
    sampling = config.rollout.sampling
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


def needs_drafter(config: ClusterConfig) -> bool:
    """Drafter trainers are started only when a strategy drafts with the drafter. Training one that nothing uses would
    burn the idle time for a curve nobody asked for."""
    return any(s.learned for s in config.speculation.strategies)
