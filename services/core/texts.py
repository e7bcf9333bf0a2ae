"""Prompts and rollouts as verifiers need them, which read text: token ids and log probabilities of long responses are
nearly all that would be sent. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from services.core.types import Prompt, Rollout


def prompt_text(prompt: Prompt) -> Prompt:
    """Without token ids."""
    return replace(prompt, token_ids=())


def rollout_text(rollout: Rollout) -> Rollout:
    """Without token ids and log probabilities."""
    return replace(rollout, prompt_ids=(), response_ids=(), rollout_logprobs=())
