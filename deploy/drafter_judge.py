"""A target with held-out prompts, to judge drafters by: what it says, and how the native engine drafts for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from deploy.warmup_rollouts import collect_states
from services.core.types import GroupWork, Prompt, Rollout, SamplingParams
from services.drafter.head import TargetHead, target_head
from services.models.device import pick_device
from services.models.files import model_dir, read_config, read_tensors
from services.models.hidden import HiddenStates
from services.models.layers import ModelSpec, model_spec
from services.models.target import EMBED, HEAD, TargetModel
from services.models.tokenizer import load_tokenizer
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex

STATE_TOKENS = 4096  # of one forward pass
SUFFIX_TOKENS = 10**6


@dataclass(frozen=True)
class Requests:
    """`siblings` responses of at most `max_tokens` to each prompt, `running` at a time."""

    prompts: tuple[Prompt, ...]
    siblings: int
    max_tokens: int
    running: int
    seed: int = 0

    def at(self, temperature: float) -> Requests:
        """Greedy siblings say the same: one is enough, and a look-up would know the others from it."""
        siblings = self.siblings if temperature else 1
        return Requests(self.prompts, siblings, self.max_tokens, self.running, self.seed)


@dataclass
class Recorded:
    """A selector that always takes one strategy and keeps what its rounds brought."""

    strategy: DraftStrategy
    outcomes: list[RoundOutcome] = field(default_factory=list)

    def choose(self, view: RoundView) -> Choice:
        return Choice(self.strategy, "the one that is judged")

    def record(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


class Judge:
    """Everything of the target loaded once; a new engine per run, so that nothing is remembered between runs."""

    def __init__(self, target: str, policy: Mapping[str, Tensor] | None = None) -> None:
        """`policy`: weights in place of the folder's."""
        torch.set_num_threads(1)  # as a rollout server runs
        self.folder: Path = model_dir(target)
        self.device = pick_device("auto")
        self.config = read_config(self.folder)
        self.spec: ModelSpec = model_spec(self.config)
        self.tokenizer = load_tokenizer(target)
        self.policy: Mapping[str, Tensor] = read_tensors(self.folder) if policy is None else policy
        self.clock: Callable[[], float] = time.process_time if self.device.type == "cpu" else time.perf_counter

    @cached_property
    def head(self) -> TargetHead:
        found = {name: t for name, t in self.policy.items() if name in (EMBED, HEAD)}
        return target_head({EMBED: found[EMBED]} if self.spec.tied else found, self.spec, 0, self.device)

    @cached_property
    def model(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in self.policy.items():
                if name in named:
                    named[name].copy_(tensor)
        return model.to(self.device).eval()

    def engine(
        self, running: int, max_len: int, strategies: Sequence[DraftStrategy], recorded: Recorded
    ) -> NativeEngine:
        index = SuffixIndex(SUFFIX_TOKENS) if any(s.drafter == "suffix" for s in strategies) else None
        nodes = max(s.num_draft_tokens for s in strategies)
        options = EngineOptions(running, max_len, nodes, suffix_index=index)
        target = TargetModel(self.spec, max_len + options.spare_columns, self.device, torch.float32)
        engine = NativeEngine(target, options, recorded, self.tokenizer.decode, self.clock)
        engine.load_policy(0, self.policy)
        return engine

    def generate(
        self,
        strategy: DraftStrategy,
        requests: Requests,
        temperature: float,
        drafter: Mapping[str, Tensor] | None = None,
    ) -> tuple[list[Rollout], list[RoundOutcome]]:
        recorded = Recorded(strategy)
        longest = max(len(p.token_ids) for p in requests.prompts) + requests.max_tokens
        engine = self.engine(max(requests.running, requests.siblings), longest, (OFF, strategy), recorded)
        if drafter is not None:
            engine.load_drafter(0, drafter)
        sampling = SamplingParams(
            temperature=temperature, max_tokens=requests.max_tokens, stop_token_ids=self.tokenizer.eos_token_ids
        )
        indices, works = tuple(range(requests.siblings)), []
        for g, prompt in enumerate(requests.prompts):
            seeds = tuple(1_000_003 * requests.seed + 101 * g + i for i in indices)
            works.append(GroupWork(f"g{g}", prompt, indices, seeds, sampling))
        engine.submit(works)
        rollouts: list[Rollout] = []
        while engine.num_running or engine.num_waiting:
            rollouts += engine.step()
        return rollouts, recorded.outcomes

    def states(self, rollouts: Sequence[Rollout], aux_layers: Sequence[int]) -> list[HiddenStates]:
        return collect_states(self.model, rollouts, aux_layers, STATE_TOKENS)
