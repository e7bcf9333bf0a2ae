"""One policy step by any number of workers, each a process of its own where there are several (gloo)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from services.config.policy import Dapo, PolicyConfig
from services.core.types import AcceptanceStats, FinishReason, PolicyStepReport, Rollout, SamplingParams, TrainBatch
from services.models.hidden import HiddenStates
from services.policy.sharding import own, whole
from services.policy.team import ALONE, Team, joined_team
from services.policy.trainer import PolicyTrainer

VOCAB = 23
# Seven rollouts in four groups: no number of packs is a multiple of two by itself.
LENGTHS = [(3, 9), (5, 2), (1, 1), (4, 30), (2, 7), (6, 12), (3, 3)]
ADVANTAGES = (1.0, -1.0, 0.5, -0.25, 2.0, -1.5, 0.0)


@dataclass(frozen=True)
class Case:
    """`steps` train steps of a new model; `spoil`: the step in which every rollout is unusable;
    `silent`: the one in which none has an advantage."""

    policy: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True
    compute: torch.dtype | None = None
    aux_layers: tuple[int, ...] = ()
    steps: int = 1
    spoil: int | None = None
    silent: int | None = None


@dataclass
class Outcome:
    """Of the worker that leads. `gradients`: one vector for each update, clipped."""

    reports: list[PolicyStepReport] = field(default_factory=list)
    hidden: list[list[HiddenStates]] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    passes: int = 0


def new_model(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.1, tie_word_embeddings=tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def batch(step: int, spoiled: bool = False, silent: bool = False) -> TrainBatch:
    g = torch.Generator().manual_seed(step)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB, (count,), generator=g).tolist())

    rollouts = tuple(
        Rollout(
            group_id=f"g{i // 2}", prompt_id=f"p{i // 2}", index=i, seed=i, prompt_ids=ids(prompt),
            response_ids=ids(response), rollout_logprobs=(-2.0 - 0.1 * i,) * response, text="",
            finish_reason=FinishReason.ABORT if spoiled else FinishReason.STOP, sampling=SamplingParams(),
            policy_versions=(0,), drafter_versions=(), acceptance=AcceptanceStats(),
        )
        for i, (prompt, response) in enumerate(LENGTHS)
    )  # fmt: skip
    return TrainBatch(step, rollouts, (0.0,) * len(rollouts) if silent else ADVANTAGES)


def new_trainer(case: Case, team: Team = ALONE, away: bool = False) -> PolicyTrainer:
    ticks = itertools.count()
    policy = PolicyConfig(**{"algorithm": Dapo(), "learning_rate": 0.01, **case.policy})
    model = new_model(case.tied)
    clock = lambda: float(next(ticks))  # noqa: E731
    made = PolicyTrainer(model, policy, clock, case.compute, case.aux_layers, True, team, away=away)
    if made._reference is not None:  # away from the policy, so that KL counts
        with torch.no_grad():
            for p in made._reference.parameters():
                own(made.residence.at_hand(p.detach())).mul_(1.02)
    return made


def outcome_of(case: Case, team: Team = ALONE) -> Outcome:
    made, found = new_trainer(case, team), Outcome()

    def keep(*_: object) -> None:
        found.gradients.append(torch.cat([whole(p.grad).flatten().clone() for p in made._parameters]))

    def count(*_: object) -> None:
        found.passes += 1

    made._optimizer.register_step_pre_hook(keep)
    made._scorer.register_forward_pre_hook(count)
    for number in range(1, case.steps + 1):
        step = made.train_step(batch(number, number == case.spoil, number == case.silent))
        found.reports.append(step.report)
        found.hidden.append(step.hidden)
    found.state = made.state()
    return found


def in_team(size: int, folder: Path, work: Any, *args: Any) -> list[Any]:
    """What `work(team, *args)` returns in each of `size` processes of one team, in the order of ranks."""
    mp.spawn(_join, (size, folder, work, args), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _join(rank: int, size: int, folder: Path, work: Any, args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        torch.save(work(joined_team(torch.device("cpu")), *args), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
