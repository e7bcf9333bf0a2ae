"""A drafter with a head of its own: loss and acceptance are those of its tokens, and a run keeps the mapping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.config.drafter import DrafterConfig
from services.core.errors import DataError
from services.drafter.export import write_drafter_folder
from services.drafter.loss import LossTerms, drafter_loss, expected_acceptance, supervised_counts
from services.drafter.packing import pack_states
from services.drafter.state import initial_drafter_state, read_drafter
from services.drafter.trainer import DrafterTrainer
from services.models.drafter import OWN_HEAD, DraftHead
from services.models.eagle3 import Eagle3, pick_aux_layers
from services.models.files import read_config
from services.models.layers import model_spec
from services.models.methods import drafter_folder, drafter_method
from services.models.vocabulary import D2T

CPU = torch.device("cpu")
LOSSES = ("cross_entropy", "total_variation", "acceptance_likelihood")
IDS = (0, 3, 4, 9, 17, 23)


@pytest.fixture
def rows(make_states):
    return pack_states(make_states((3, 9), (2, 12), name="eagle3"), 64, CPU)[0]


def predicted_like(rows) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(3)
    return [rows.target_hidden + 0.5 * torch.randn(rows.target_hidden.shape, generator=noise) for _ in range(2)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_targets_head_over_all_tokens_is_the_same_as_none(rows, make_head, loss: str, temperature: float) -> None:
    head, predicted = make_head().head, predicted_like(rows)
    terms, counts = LossTerms(loss, 0.0, 0.8, temperature, 0.1), supervised_counts([rows], 2)
    own = DraftHead(head, torch.arange(head.shape[0]))
    one, other = (drafter_loss(predicted, rows, head, counts, terms, h) for h in (None, own))
    assert torch.allclose(one.loss, other.loss, rtol=1e-5)
    assert one.overlap == pytest.approx(other.overlap, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_over_some_tokens_against_one_over_all_that_never_draws_the_others(
    rows, make_head, loss: str, temperature: float
) -> None:
    """The exact acceptance, token by token; and every loss is finite and falls along its gradient."""
    head, predicted, ids = make_head().head, predicted_like(rows), torch.tensor(IDS)
    noise = torch.randn(len(IDS), head.shape[1], generator=torch.Generator().manual_seed(1))
    weight = (head[ids] + 0.1 * noise).requires_grad_()
    alphas = expected_acceptance(predicted, rows, head, temperature, DraftHead(weight, ids))
    for depth, alpha in enumerate(alphas):
        for r, t in (rows.loss_mask & rows.started(depth)).nonzero().tolist():
            target, draft = rows.target_hidden[r, t] @ head.T, torch.full((head.shape[0],), -torch.inf)
            draft[ids] = (predicted[depth][r, t] @ weight.T).detach()
            if temperature:
                wanted = torch.minimum((target / temperature).softmax(-1), (draft / temperature).softmax(-1)).sum()
            else:
                wanted = (target.argmax() == draft.argmax()).float()
            assert alpha[r, t].item() == pytest.approx(wanted.item(), abs=1e-5)
    terms, counts = LossTerms(loss, 0.0, 0.8, temperature, 0.1), supervised_counts([rows], 2)
    found = drafter_loss(predicted, rows, head, counts, terms, DraftHead(weight, ids))
    found.loss.backward()
    assert torch.isfinite(found.loss) and torch.isfinite(weight.grad).all() and weight.grad.abs().sum() > 0
    moved = DraftHead((weight - 0.05 * weight.grad / weight.grad.norm()).detach(), ids)
    assert drafter_loss(predicted, rows, head, counts, terms, moved).loss < found.loss


@pytest.fixture
def warm_start(model_folder, make_drafter, tmp_path: Path) -> tuple[Path, Path]:
    """A target's folder, and a drafter with a head of its own beside it."""
    folder = model_folder("llama", False, "eagle3")
    spec = model_spec(read_config(folder))
    method = Eagle3(spec, pick_aux_layers((), spec.num_layers), IDS)
    write_drafter_folder(make_drafter(method).tensors(), method, read_config(folder), tmp_path / "published")
    return folder, tmp_path / "published"


def test_row_26_training_goes_on_with_the_mapping_of_the_checkpoint(
    warm_start, make_config: Callable, make_states, make_head
) -> None:
    folder, published = warm_start
    config = make_config(folder, method="eagle3", path=published)
    assert drafter_folder(config) == published
    state = initial_drafter_state(config)
    spec = model_spec(read_config(folder))
    trainer = DrafterTrainer(spec, config.drafter, 1.0, CPU)
    assert trainer.method.draft_ids == IDS
    trainer.load_head(make_head())
    trainer.load_state(state)
    states = make_states((3, 20), (2, 25), name="eagle3")
    losses = [trainer.train_micro_step(states).loss for _ in range(30)]
    assert sum(losses[-3:]) < sum(losses[:3])
    trained = trainer.state()["tensors"]
    assert not torch.equal(trained[OWN_HEAD], state["tensors"][OWN_HEAD]), "its head learns too"
    out = published.parent / "out"
    write_drafter_folder(trained, trainer.method, read_config(folder), out)
    before, after = (load_file(place / "model.safetensors") for place in (published, out))
    assert torch.equal(before[D2T], after[D2T]) and read_config(out)["draft_vocab_size"] == len(IDS)
    again = read_drafter(out, drafter_method(config.drafter.model_copy(update={"path": out}), spec))
    assert all(torch.equal(again[name], tensor) for name, tensor in trained.items())


def test_another_mapping_than_the_runs_is_refused(warm_start, make_drafter) -> None:
    folder, published = warm_start
    spec = model_spec(read_config(folder))
    other = Eagle3(spec, pick_aux_layers((), spec.num_layers), (1, *IDS[1:]))
    write_drafter_folder(make_drafter(other).tensors(), other, read_config(folder), published.parent / "other")
    method = drafter_method(DrafterConfig(method="eagle3", path=published), spec)
    with pytest.raises(DataError, match="d2t maps the rows of the head to other tokens"):
        read_drafter(published.parent / "other", method)
    with pytest.raises(DataError, match="has draft_vocab_size 6, but this run's drafter has the LM head of the target"):
        read_drafter(published, drafter_method(DrafterConfig(method="eagle3"), spec))
