"""`longtail warmup`: make the pocket model and its first drafter from worked traces, measured on held-out problems.

Two stages: supervised learning of the target, then a short EAGLE warm start on the target's own responses. The drafter
is left far from finished on purpose: in the run it learns in the idle time of the tail.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import quantiles

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from deploy.warmup_card import WarmupResult, write_card
from deploy.warmup_target import Example, new_model, train_target
from services.config.load import dump_config
from services.config.schema import ClusterConfig
from services.core.types import GroupWork, Prompt, Rollout, SamplingParams
from services.data.source import PromptSets, load_prompts
from services.data.traces import CHARACTERS, chain_sum_trace
from services.drafter.export import write_drafter_folder
from services.drafter.head import target_head
from services.drafter.state import fresh_state
from services.drafter.trainer import DrafterTrainer
from services.models.device import pick_device
from services.models.drafter import EagleDrafter
from services.models.files import read_config
from services.models.hidden import HiddenStates
from services.models.layers import model_spec
from services.models.target import TargetModel
from services.models.tokenizer import BOS, EOS, PAD, Tokenizer, character_tokenizer
from services.reward.service import build_reward_service
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.selector import Fixed
from services.speculation.strategy import OFF

VOCAB_MULTIPLE = 16  # unused rows at the end of the embedding; kernels like round sizes
DRAFTER_ROLLOUTS = 512


def run_warmup(config: ClusterConfig, out: Path, say: Callable[[str], None] = print) -> WarmupResult:
    """Write `out`/target and `out`/drafter; returns the measured figures. Seeded by run.seed."""
    torch.manual_seed(config.run.seed)
    torch.set_num_threads(config.policy.threads)
    device = pick_device(config.model.device)
    tokenizer = _write_tokenizer(out / "target")
    prompts = load_prompts(config, tokenizer)
    vocab = -(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    model = new_model(config.warmup, vocab, 2048, EOS, PAD, BOS).to(device)
    started = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        if step % 25 == 0 or step == config.warmup.steps:
            say(f"target step {step}/{config.warmup.steps}  loss {loss:.4f}  {time.monotonic() - started:.0f} s")

    train_target(model, _examples(prompts.train, tokenizer, config.run.seed), config.warmup, on_step)
    target_seconds = time.monotonic() - started
    model.config.use_cache = model.generation_config.use_cache = True  # was off for training; generation wants it
    disable_progress_bar()
    model.eval().save_pretrained(out / "target")
    figures = _evaluate(model, tokenizer, prompts, config, say)
    started = time.monotonic()
    acceptance, count = _warm_drafter(model, tokenizer, prompts, config, out, say)
    result = WarmupResult(
        parameters=sum(p.numel() for p in model.parameters()),
        drafter_parameters=count,
        drafter_acceptance_length=acceptance,
        target_seconds=target_seconds,
        drafter_seconds=time.monotonic() - started,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **figures,
    )
    write_card(out, result, config)
    (out / "warmup.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    (out / "warmup.yaml").write_text(dump_config(config), encoding="utf-8")
    return result


def _write_tokenizer(folder: Path) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    core = character_tokenizer(CHARACTERS)
    core.save(str(folder / "tokenizer.json"))
    return Tokenizer(core, folder, (EOS,))


def _examples(prompts: Sequence[Prompt], tokenizer: Tokenizer, seed: int) -> Iterator[Example]:
    """Training prompts in random order for ever, each time with a newly worded trace."""
    rng = Random(f"{seed}/warmup")
    while True:
        for prompt in rng.sample(prompts, len(prompts)):
            trace = tokenizer.encode(chain_sum_trace(prompt.text, rng))
            yield Example((*prompt.token_ids, *trace, EOS), len(prompt.token_ids))


def _generate(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: Sequence[Prompt], config: ClusterConfig, temperature: float
) -> list[Rollout]:
    """One response per prompt from the native engine, in prompt order."""
    engine_config, device = config.rollout.engine, next(model.parameters()).device
    options = EngineOptions(min(128, len(prompts)), engine_config.max_len, max_nodes=1)
    spec = model_spec(model.config.to_dict())
    target = TargetModel(spec, options.max_len + options.spare_columns, device, torch.float32)
    engine = NativeEngine(target, options, Fixed(OFF), tokenizer.decode, time.monotonic)
    engine.load_policy(0, _published(model))
    sampling = SamplingParams(
        temperature=temperature, max_tokens=config.rollout.sampling.max_tokens, stop_token_ids=(EOS,)
    )
    for i, prompt in enumerate(prompts):
        engine.submit(GroupWork(str(i), prompt, (0,), (config.run.seed + 1000 + i,), sampling))
    rollouts: list[Rollout] = []
    while len(rollouts) < len(prompts):
        rollouts.extend(engine.step())
    return sorted(rollouts, key=lambda r: int(r.group_id))


def _published(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    return {k: v.detach() for k, v in model.state_dict().items() if k != "lm_head.weight"}


def _evaluate(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    prompts: PromptSets,
    config: ClusterConfig,
    say: Callable[[str], None],
) -> dict[str, float]:
    heldout = prompts.heldout[: config.warmup.eval_prompts]
    rewards = build_reward_service(config)
    try:
        rates, lengths = {}, []
        for temperature in (0.0, 1.0):
            rollouts = _generate(model, tokenizer, heldout, config, temperature)
            scores = rewards.score(heldout, rollouts)
            rates[temperature] = sum(s.correct for s in scores) / len(scores)
            lengths = sorted(len(r.response_ids) for r in rollouts)
            say(f"held-out pass rate at temperature {temperature}: {rates[temperature]:.3f} of {len(heldout)}")
    finally:
        rewards.close()
    cuts = quantiles(lengths, n=100, method="inclusive")
    return {
        "heldout_pass_rate": rates[1.0], "heldout_pass_rate_greedy": rates[0.0], "heldout_prompts": len(heldout),
        "response_len_p50": cuts[49], "response_len_p99": cuts[98], "response_len_max": lengths[-1],
    }  # fmt: skip


@torch.no_grad()
def _hidden_states(model: Qwen3ForCausalLM, rollout: Rollout) -> HiddenStates:
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]], device=next(model.parameters()).device)
    hidden = model.model(input_ids=ids).last_hidden_state[0]
    mask = torch.zeros(ids.shape[1], dtype=torch.bool)
    mask[len(rollout.prompt_ids) :] = True
    return HiddenStates(ids[0].cpu(), hidden.cpu(), mask, policy_version=0)


def _warm_drafter(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    prompts: PromptSets,
    config: ClusterConfig,
    out: Path,
    say: Callable[[str], None],
) -> tuple[float, int]:
    """EAGLE warm start on the target's own responses to training prompts; offline acceptance on held-out ones."""
    rng = Random(f"{config.run.seed}/drafter")
    target_config = read_config(out / "target")
    spec = model_spec(target_config)
    drafter_config = config.drafter.model_copy(update={"learning_rate": config.warmup.drafter_learning_rate})
    device = next(model.parameters()).device
    trainer = DrafterTrainer(spec, drafter_config, 1.0, device)
    trainer.load_head(target_head(_published(model), spec, 0, device))
    network = EagleDrafter(spec)
    network.reset(torch.Generator().manual_seed(config.run.seed))
    trainer.load_state(fresh_state(network.tensors(), spec))
    chosen = rng.sample(prompts.train, min(DRAFTER_ROLLOUTS, len(prompts.train)))
    states = [_hidden_states(model, r) for r in _generate(model, tokenizer, chosen, config, 1.0)]
    for step in range(config.warmup.drafter_steps):
        micro = trainer.train_micro_step(_fill(states, drafter_config.pack_tokens, rng))
        if (step + 1) % 10 == 0:
            overlap = " ".join(f"{a:.2f}" for a in micro.expected_acceptance)
            say(f"drafter step {step + 1}/{config.warmup.drafter_steps}  loss {micro.loss:.3f}  overlap {overlap}")
    heldout = prompts.heldout[: config.warmup.eval_prompts // 4]
    unseen = [_hidden_states(model, r) for r in _generate(model, tokenizer, heldout, config, 1.0)]
    state = trainer.state()
    estimate = trainer.estimate("warm start", state["tensors"], unseen)
    write_drafter_folder(state["tensors"], target_config, out / "drafter", state["total_steps"])
    return estimate.acceptance_length, sum(t.numel() for t in state["tensors"].values())


def _fill(states: Sequence[HiddenStates], tokens: int, rng: Random) -> list[HiddenStates]:
    picked: list[HiddenStates] = []
    while tokens > 0:
        picked.append(rng.choice(states))
        tokens -= len(picked[-1].input_ids)
    return picked
