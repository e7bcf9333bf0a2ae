"""Models whose embedding is their head, or whose end of sequence is their padding: nothing may be left out for that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.config.policy import Dapo, PolicyConfig
from services.core.types import PolicyStepReport, Rollout, TrainBatch
from services.policy.logprobs import Scorer
from services.policy.packs import make_packs
from services.policy.service import load_policy_model
from services.policy.trainer import PolicyTrainer

EMBED, HEAD, END = "model.embed_tokens.weight", "lm_head.weight", 2
CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "qwen3")


def gradients(model: PreTrainedModel, rollouts: list[Rollout]) -> tuple[PolicyStepReport, dict[str, torch.Tensor]]:
    trainer = PolicyTrainer(model, PolicyConfig(algorithm=Dapo(), grad_clip=1e9), lambda: 0.0)
    found: dict[str, torch.Tensor] = {}
    trainer._optimizer.step = lambda: found.update(  # type: ignore[method-assign]
        {name: p.grad.clone() for name, p in model.named_parameters()}
    )
    report = trainer.train_step(TrainBatch(1, tuple(rollouts), tuple((-1.0) ** i for i in range(len(rollouts))))).report
    return report, found


def loaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    return load_policy_model(str(folder), CPU)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_tied_embedding_learns_through_both_uses(make_model, make_rollout, tmp_path: Path, kind: str) -> None:
    tied, untied = make_model(kind, tied=True), make_model(kind, tied=False)
    untied.load_state_dict(tied.state_dict())
    models = [loaded(m, tmp_path / name) for name, m in (("tied", tied), ("untied", untied))]
    rollouts = [make_rollout(i, 4, 6 + i) for i in range(4)]
    (_, both), (_, apart) = (gradients(m, rollouts) for m in models)
    assert HEAD not in both and min(apart[name].norm() for name in (EMBED, HEAD)) > 1e-3
    assert torch.allclose(both[EMBED], apart[EMBED] + apart[HEAD], atol=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_an_end_that_is_the_padding_is_seen_and_learnt(
    make_model, make_rollout, tmp_path: Path, kind: str, tied: bool
) -> None:
    """As with SmolLM2: the id closes the turns of a chat prompt and ends the response. With or without a padding token
    in config.json everything is the same; were anything masked by it, or its embedding left out, it would not be."""
    ends = {"prompt_ids": (5, END, 6, END, 7), "response_ids": (8, 9, END)}
    rollouts = [make_rollout(0, **{**ends, "rollout_logprobs": (-2.0,) * 3}), make_rollout(1, 5, 7), make_rollout(2)]
    found = []
    for name, pad in (("named", END), ("none", None)):
        model = make_model(kind, tied=tied)
        model.config.pad_token_id, model.config.eos_token_id = pad, END
        ready = loaded(model, tmp_path / name)
        assert ready.config.pad_token_id == pad
        found.append(gradients(ready, rollouts))
    (report, named), (other, none) = found
    assert report.num_tokens == other.num_tokens == sum(len(r.response_ids) for r in rollouts)
    assert (report.loss, report.grad_norm) == (other.loss, other.grad_norm)
    assert all(torch.equal(named[name], none[name]) for name in none)
    assert named[EMBED][END].norm() > 1e-3


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_end_inside_a_prompt_hides_nothing(make_model, make_rollout, kind: str) -> None:
    """The trainer's log-probabilities, packed beside another sequence, are those of the bare sequence."""
    model = make_model(kind)
    model.config.pad_token_id = model.config.eos_token_id = END
    ids, response = (5, END, 6, END, 7), (8, END, 9, END)
    rollout = make_rollout(0, prompt_ids=ids, response_ids=response, rollout_logprobs=(-2.0,) * 4)
    (pack,) = make_packs([rollout, make_rollout(1, 9, 9)], [1.0, -1.0], [1.0, 1.0], [0, 1], 64, CPU)
    scored = Scorer(model)(pack).logprobs[pack.segments == pack.members.index(0)]
    logits = model(input_ids=torch.tensor([[*ids, *response]])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
    assert torch.allclose(scored, expected, atol=1e-5)
