"""The yardsticks of the GPU tests: the trainer's own model (teacher-forced) and the native engine's samples."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from deploy.inputs import load_inputs
from services.core.types import GroupWork, Prompt, SamplingParams
from services.models.device import pick_device
from services.models.files import read_config, read_tensors
from services.models.layers import model_spec
from services.models.target import TargetModel
from services.policy.logprobs import uncertainty
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.selector import Fixed
from services.speculation.strategy import OFF
from tests.gpu.cases import CASES, case_config

HELDOUT, PREFIXES, DRAWS = 48, 3, 1024
CUDA = pick_device("auto")
CLOSE_LOGITS = 0.25  # bf16 logits of about 16 are 0.0625..0.125 apart; a real fault differs by whole units


class Reference:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = case_config(CASES["off"], folder)
        inputs = load_inputs(config)
        self.heldout = [list(p.token_ids) for p in inputs.heldout[:HELDOUT]]
        self.long = sorted((list(p.token_ids) for p in inputs.heldout), key=len)[-16:]
        self.eos = inputs.sampling.stop_token_ids[0]

    @cached_property
    def model(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            self.folder / "target", dtype=torch.bfloat16, local_files_only=True
        )
        return model.to(CUDA).eval()

    def prompts(self) -> dict[str, Any]:
        return {"heldout": self.heldout, "long": self.long, "eos": self.eos, "prefixes": self.prefixes, "draws": DRAWS}

    @cached_property
    def prefixes(self) -> list[list[int]]:
        """Where the next tokens are least certain: prompt + part of a sampled response, cut where the model's entropy
        over two tokens is largest. A well trained model is sure of nearly all."""
        rollouts = self.sample(self.heldout[:16], SamplingParams(max_tokens=256, stop_token_ids=(self.eos,)), 1)
        best: list[tuple[float, list[int]]] = []
        for prompt, ids, _ in rollouts:
            entropy = torch.distributions.Categorical(logits=self.logits(prompt, ids)).entropy()
            if len(ids) > 1:
                value, at = (entropy[:-1] + entropy[1:]).max(0)
                best.append((float(value), prompt + ids[: int(at)]))
        return [prefix for _, prefix in sorted(best, reverse=True)[:PREFIXES]]

    @cached_property
    def draws(self) -> list[list[tuple[int, ...]]]:
        """DRAWS continuations of three tokens per prefix, by the native engine."""
        sampling = SamplingParams(max_tokens=3)
        return [
            [tuple(ids) for _, ids, _ in self.sample([prefix] * DRAWS, sampling, seed=50 + i)]
            for i, prefix in enumerate(self.prefixes)
        ]

    def sample(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, seed: int
    ) -> list[tuple[list[int], list[int], list[float]]]:
        """(prompt, ids, logprobs) of one native response per prompt, in prompt order."""
        spec = model_spec(read_config(self.folder / "target"))
        longest = max(map(len, prompts)) + sampling.max_tokens
        options = EngineOptions(max_running=min(512, len(prompts)), max_len=longest, max_nodes=1)
        target = TargetModel(spec, longest + options.spare_columns, CUDA, torch.bfloat16)
        engine = NativeEngine(target, options, Fixed(OFF), lambda ids: "", time.monotonic)
        tensors = read_tensors(self.folder / "target")
        engine.load_policy(0, {n: t for n, t in tensors.items() if not (spec.tied and n == "lm_head.weight")})
        works = []
        for i, ids in enumerate(prompts):
            prompt = Prompt(str(i), "", tuple(ids), "", "t")
            works.append(GroupWork(str(i), prompt, (0,), (seed * 1_000_003 + i,), sampling))
        engine.submit(works)
        found = []
        while len(found) < len(prompts):
            found.extend(engine.step())
        found.sort(key=lambda r: int(r.group_id))
        return [(list(r.prompt_ids), list(r.response_ids), list(r.rollout_logprobs)) for r in found]

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int], norm_factor: float = 1.0) -> Tensor:
        """[len(response), V] float32: the distribution each response token was drawn from, teacher-forced.

        `norm_factor` scales the first layer's input norm, as the mid-response probe does."""
        norm = self.model.model.layers[0].input_layernorm.weight
        kept = norm.detach().clone()
        norm.data.mul_(norm_factor)
        try:
            ids = torch.tensor([[*prompt, *response]], device=CUDA)
            out = self.model(input_ids=ids).logits[0].float()
        finally:
            norm.data.copy_(kept)
        return out[len(prompt) - 1 : -1]

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), H] float32: the last hidden states behind the final norm."""
        inputs = torch.tensor([list(ids)], device=CUDA)
        return self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state[0].float().cpu()

    def logprobs(self, rollout: dict[str, Any], norm_factor: float = 1.0) -> Tensor:
        """[T] at temperature 1."""
        ids = torch.tensor(rollout["ids"], device=CUDA)
        logits = self.logits(rollout["prompt_ids"], rollout["ids"], norm_factor)
        return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].cpu()

    def surprise_errors(self, rollouts: Sequence[dict[str, Any]]) -> float:
        """Of responses at temperature 1, as `services.policy.tally` has it of a step's."""
        surprise = spread = 0.0
        for rollout in rollouts:
            told = self.logits(rollout["prompt_ids"], rollout["ids"]).log_softmax(-1).cpu()
            entropy, spreads = uncertainty(told)
            spread += float(spreads.sum())
            surprise -= float(told.gather(1, torch.tensor(rollout["ids"])[:, None])[:, 0].sum() + entropy.sum())
        return surprise / math.sqrt(spread)


def compare_greedy(reference: Reference, base: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of equal and different outputs; margins: the target's logit gap between the two tokens that part."""
    margins, equal = [], 0
    for a, b in zip(base, other, strict=True):
        at = next((t for t, (x, y) in enumerate(zip(a["ids"], b["ids"], strict=False)) if x != y), None)
        if at is None:
            equal += a["ids"] == b["ids"]
            continue
        logits = reference.logits(a["prompt_ids"], a["ids"][: at + 1])[-1]
        margins.append(abs(float(logits[a["ids"][at]] - logits[b["ids"][at]])))
    near = sum(m <= CLOSE_LOGITS for m in margins)
    shown = [round(m, 4) for m in sorted(margins)]
    return {"prompts": len(base), "equal": equal, "near_ties": near, "real": len(margins) - near, "margins": shown}
