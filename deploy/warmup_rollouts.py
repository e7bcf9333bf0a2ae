"""Responses of the warmed-up target: for its figures on held-out problems, and for the drafters to learn from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import quantiles

import torch
from transformers import PreTrainedModel

from deploy.warmup_target import padded_runs
from services.config.schema import ClusterConfig
from services.core.types import GroupWork, Prompt, Rollout, SamplingParams
from services.data.source import PromptSets
from services.models.capture import target_states
from services.models.device import pick_dtype
from services.models.hidden import HiddenStates
from services.models.layers import model_spec
from services.models.target import HEAD, TargetModel
from services.models.tokenizer import Tokenizer
from services.reward.service import build_reward_service
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.selector import Fixed
from services.speculation.strategy import OFF

FIRST_SEED = 1000
TELL_EVERY_S = 5.0


@dataclass(frozen=True)
class WarmupRollouts:
    """`greedy` and `sampled` (temperature 1) answer the held-out prompts, `training` (temperature 1) the training
    prompts drawn for the drafters."""

    heldout: tuple[Prompt, ...]
    greedy: tuple[Rollout, ...]
    sampled: tuple[Rollout, ...]
    training: tuple[Rollout, ...]


@dataclass(frozen=True)
class HeldoutFigures:
    """Pass rates, and response lengths in tokens at temperature 1."""

    heldout_pass_rate: float
    heldout_pass_rate_greedy: float
    heldout_prompts: int
    response_len_p50: float
    response_len_p99: float
    response_len_max: int


@dataclass(frozen=True)
class _Wanted:
    prompt: Prompt
    temperature: float
    seed: int


def warmup_rollouts(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: PromptSets,
    config: ClusterConfig,
    rng: Random,
    say: Callable[[str], None],
) -> WarmupRollouts:
    """All responses in one go: the long ones of every kind run beside each other instead of one after another."""
    heldout = prompts.heldout[: config.warmup.eval_prompts]
    chosen = rng.sample(prompts.train, min(config.warmup.drafter_rollouts, len(prompts.train)))
    kinds = ((heldout, 0.0), (heldout, 1.0), (chosen, 1.0))
    first = config.run.seed + FIRST_SEED
    wanted = [_Wanted(p, temperature, first + i) for some, temperature in kinds for i, p in enumerate(some)]
    done = _generate(model, tokenizer, wanted, config, say)
    n = len(heldout)
    return WarmupRollouts(tuple(heldout), tuple(done[:n]), tuple(done[n : 2 * n]), tuple(done[2 * n :]))


def _generate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    wanted: Sequence[_Wanted],
    config: ClusterConfig,
    say: Callable[[str], None],
) -> list[Rollout]:
    """One response each from the native engine, in the order asked for."""
    options = EngineOptions(min(config.warmup.max_running, len(wanted)), config.rollout.engine.max_len, max_nodes=1)
    columns, dtype = options.max_len + options.spare_columns, pick_dtype(config.model.dtype)
    target = TargetModel(model_spec(model.config.to_dict()), columns, model.device, dtype)
    engine = NativeEngine(target, options, Fixed(OFF), tokenizer.decode, time.monotonic)
    engine.load_policy(0, published(model))
    most, ends = config.rollout.sampling.max_tokens, tokenizer.eos_token_ids
    works = []
    for i, w in enumerate(wanted):
        sampling = SamplingParams(temperature=w.temperature, max_tokens=most, stop_token_ids=ends)
        works.append(GroupWork(str(i), w.prompt, (0,), (w.seed,), sampling))
    engine.submit(works)
    rollouts: list[Rollout] = []
    told = time.monotonic()
    while len(rollouts) < len(wanted):
        rollouts.extend(engine.step())
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            say(f"responses {len(rollouts)}/{len(wanted)}  running {engine.num_running}")
    return sorted(rollouts, key=lambda r: int(r.group_id))


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a publisher would send: a tied head is left out."""
    tied = {HEAD} if model_spec(model.config.to_dict()).tied else set()
    return {k: v.detach() for k, v in model.state_dict().items() if k not in tied}


def heldout_figures(rollouts: WarmupRollouts, config: ClusterConfig) -> HeldoutFigures:
    """Score the held-out responses with the run's verifier."""
    rewards = build_reward_service(config)
    try:
        greedy, sampled = (
            sum(s.correct for s in rewards.score(rollouts.heldout, some)) / len(some)
            for some in (rollouts.greedy, rollouts.sampled)
        )
    finally:
        rewards.close()
    lengths = sorted(len(r.response_ids) for r in rollouts.sampled)
    cuts = quantiles(lengths, n=100, method="inclusive") if len(lengths) > 1 else lengths * 99
    return HeldoutFigures(
        heldout_pass_rate=sampled,
        heldout_pass_rate_greedy=greedy,
        heldout_prompts=len(rollouts.heldout),
        response_len_p50=cuts[49],
        response_len_p99=cuts[98],
        response_len_max=lengths[-1],
    )


@torch.no_grad()
def collect_states(
    model: PreTrainedModel, rollouts: Sequence[Rollout], aux_layers: Sequence[int], tokens: int
) -> list[HiddenStates]:
    """What a drafter learns from, in the order of `rollouts`, on the model's device; `tokens` bounds a forward pass."""
    ids = [torch.tensor([*r.prompt_ids, *r.response_ids], device=model.device) for r in rollouts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    states: dict[int, HiddenStates] = {}
    for span in padded_runs([len(ids[i]) for i in order], tokens):
        members = order[span]
        rows = torch.nn.utils.rnn.pad_sequence([ids[i] for i in members], batch_first=True)
        hidden, aux = target_states(model.base_model, aux_layers, input_ids=rows)
        for row, i in enumerate(members):
            end = len(ids[i])
            mask = torch.arange(end, device=model.device) >= len(rollouts[i].prompt_ids)
            own_aux = None if aux is None else aux[row, :end].clone()  # copies, so that the padding can go
            states[i] = HiddenStates(ids[i], hidden[row, :end].clone(), mask, 0, own_aux)
    return [states[i] for i in range(len(ids))]
