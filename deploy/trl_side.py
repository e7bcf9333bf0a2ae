"""TRL's GRPOTrainer on a configuration of ours: same weights, prompts in the same order, group size, lengths, sampling,
loss, optimizer and verifier. A process of its own (`python -m deploy.trl_side CONFIG.yaml RESULT.json`).

Set for speed on a CPU: no gradient checkpointing, float32 (bfloat16 is slower where the processor lacks it), one
generation per optimizer step, no reference model (beta 0), nothing written but the result.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from deploy.inputs import load_inputs
from services.config.load import load_config
from services.config.policy import Grpo
from services.config.schema import ClusterConfig
from services.coordinator.work import prompts_of_step
from services.core.errors import DataError
from services.core.types import AcceptanceStats, FinishReason, Prompt, Rollout, SamplingParams
from services.models.files import model_dir
from services.models.tokenizer import BOS, EOS, PAD, SPECIALS, UNK, Tokenizer, load_tokenizer
from services.policy.service import load_policy_model
from services.reward.service import RewardService, build_reward_service


def train(config: ClusterConfig, micro_batch: int, threads: int) -> dict[str, Any]:
    """`ended_s` of each step since the training began, mean reward and response tokens of each step."""
    inputs, per_step = load_inputs(config), config.rollout.prompts_per_step
    prompts = [
        prompt
        for step in range(1, config.run.steps + 1)
        for prompt in prompts_of_step(inputs.train, step, per_step, config.run.seed)
    ]
    ours = load_tokenizer(config.model.path)
    theirs = their_tokenizer(config.model.path)
    check_ids(prompts, theirs, config.data.chat_template)
    rewards, clock = build_reward_service(config), _StepClock()
    scorer = _Scorer(rewards, ours, inputs.sampling, {p.text: p for p in prompts})
    model = load_policy_model(config.model.path, torch.device("cpu"))
    model.config.use_cache = model.generation_config.use_cache = True
    dataset = Dataset.from_list([{"prompt": _prompt(p, config.data.chat_template), "key": p.text} for p in prompts])
    torch.set_num_threads(threads)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=scorer,
        args=arguments(config, micro_batch),
        train_dataset=dataset,
        processing_class=theirs,
        callbacks=[clock],
    )
    try:
        clock.start()
        trainer.train()
    finally:
        rewards.close()
    return {"ended_s": clock.ended_s, "reward": scorer.means, "response_tokens": scorer.tokens}


def arguments(config: ClusterConfig, micro_batch: int) -> GRPOConfig:
    """Their words for our settings."""
    policy, sampling, algorithm = config.policy, config.rollout.sampling, config.policy.algorithm
    assert isinstance(algorithm, Grpo)
    rollouts = config.rollout.prompts_per_step * config.rollout.group_size
    return GRPOConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=config.run.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rollouts // micro_batch,
        num_generations=config.rollout.group_size,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        num_iterations=1,
        learning_rate=policy.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta1=policy.betas[0],
        adam_beta2=policy.betas[1],
        weight_decay=policy.weight_decay,
        max_grad_norm=policy.grad_clip,
        shuffle_dataset=False,
        seed=config.run.seed,
        report_to="none",
        save_strategy="no",
        logging_steps=config.run.steps,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def their_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The model folder's; the pocket model's is a bare tokenizer.json, whose special tokens have to be named."""
    folder = model_dir(path)
    if (folder / "tokenizer_config.json").is_file():
        found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return found
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    words = {name: SPECIALS[index] for name, index in names.items()}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **words)


def check_ids(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast, chat_template: bool) -> None:
    """Both sides must feed the same ids. Raises DataError."""
    for prompt in prompts:
        if chat_template:
            ids = tokenizer.apply_chat_template(
                _prompt(prompt, True), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            ids = tokenizer(prompt.text)["input_ids"]
        if tuple(ids) != prompt.token_ids:
            raise DataError(f"the two sides would feed different ids for {prompt.text!r}: the comparison means nothing")


def _prompt(prompt: Prompt, chat_template: bool) -> str | list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}] if chat_template else prompt.text


class _StepClock(TrainerCallback):
    """When each optimizer step was over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started = clock, 0.0
        self.ended_s: list[float] = []

    def start(self) -> None:
        self._started = self._clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended_s.append(self._clock() - self._started)


class _Scorer:
    """Our verifier as their reward function. Called once per step, with all its responses."""

    __name__ = "verifier"

    def __init__(
        self, rewards: RewardService, tokenizer: Tokenizer, sampling: SamplingParams, prompts: dict[str, Prompt]
    ) -> None:
        self._rewards, self._tokenizer, self._sampling, self._prompts = rewards, tokenizer, sampling, prompts
        self.means: list[float] = []
        self.tokens: list[int] = []

    def __call__(self, key: list[str], **given: Any) -> list[float]:
        prompts, responses = [self._prompts[text] for text in key], given["completion_ids"]
        pairs = zip(prompts, responses, strict=True)
        scored = self._rewards.score(prompts, [self._rollout(prompt, ids) for prompt, ids in pairs])
        failed = [reward.error for reward in scored if reward.error is not None]
        if failed:
            raise DataError(f"{len(failed)} verifications failed, the first: {failed[0]}")
        values = [reward.value for reward in scored]
        self.means.append(sum(values) / len(values))
        self.tokens.append(sum(map(len, responses)))
        return values

    def _rollout(self, prompt: Prompt, ids: list[int]) -> Rollout:
        ended = ids[-1] in self._sampling.stop_token_ids
        return Rollout(
            group_id="", prompt_id=prompt.id, index=0, seed=0, prompt_ids=prompt.token_ids, response_ids=tuple(ids),
            rollout_logprobs=(0.0,) * len(ids), text=self._tokenizer.decode(ids),
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH, sampling=self._sampling,
            policy_versions=(0,), drafter_versions=(), acceptance=AcceptanceStats(),
        )  # fmt: skip


def main(config_file: str, result_file: str, micro_batch: str, threads: str) -> None:
    result = train(load_config(config_file), int(micro_batch), int(threads))
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
