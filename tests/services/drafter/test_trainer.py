from __future__ import annotations

import copy
import math
import pickle
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.config.drafter import DrafterConfig
from services.core.errors import BatchError, WeightError
from services.drafter.buffer import HiddenStateBuffer
from services.drafter.head import TargetHead, read_target_head
from services.drafter.objectives import OBJECTIVES
from services.drafter.spill import SpillFolder
from services.drafter.state import fresh_state
from services.drafter.trainer import DrafterTrainer, train_drafter
from services.drafter.unroll import unroll
from services.models.capture import target_states
from services.models.device import tensor_cores
from services.models.files import read_config
from services.models.hidden import HiddenStates
from services.models.layers import model_spec

METHODS = pytest.mark.parametrize("name", ["eagle", "eagle3"])
EVERY_LOSS = pytest.mark.parametrize("loss", OBJECTIVES)


def start(trainer: DrafterTrainer, make_drafter) -> DrafterTrainer:
    trainer.load_state(fresh_state(make_drafter(trainer.method).tensors(), trainer.method))
    return trainer


def learnable(make_head, name: str, count: int = 12) -> list[HiddenStates]:
    """Hidden states that a drafter can predict: each is a fixed function of the one before and of the token. The aux
    layers of EAGLE-3 hold three views of it."""
    head, g = make_head(), torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=g))[0]
    views = torch.randn(32, 96, generator=g) / 32**0.5
    found = []
    for n in (10 + 3 * i for i in range(count)):
        ids = torch.randint(0, 24, (n,), generator=g)
        rows = [torch.randn(32, generator=g)]
        for t in range(1, n):
            rows.append(torch.tanh(rows[-1] @ turn + 0.5 * head.embed[ids[t]]))
        hidden = torch.stack(rows)
        found.append(HiddenStates(ids, hidden, torch.arange(n) >= 3, 0, hidden @ views if name == "eagle3" else None))
    return found


@EVERY_LOSS
@METHODS
def test_training_raises_acceptance_at_every_depth(make_trainer, make_drafter, make_head, name, loss) -> None:
    trainer = start(make_trainer(learning_rate=3e-3, unroll=3, method=name, loss=loss), make_drafter)
    states = learnable(make_head, name)
    before = trainer.estimate("before", trainer.state()["tensors"], states)
    steps = list(train_drafter([states] * 60, trainer))
    after = trainer.estimate("after", trainer.state()["tensors"], states)
    assert trainer.total_steps == trainer.updates == 60 and all(s.updated for s in steps)
    assert steps[-1].loss < steps[0].loss
    assert all(b > a + 0.05 for a, b in zip(before.per_depth, after.per_depth, strict=True))
    assert after.acceptance_length > before.acceptance_length + 0.2
    assert all(0 <= a <= 1 for s in steps for a in s.expected_acceptance)
    assert before.drafter == "before" and before.num_tokens == sum(len(s.input_ids) - 3 for s in states)


@METHODS
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_training_on_a_targets_own_states_carries_over_to_unseen_ones(
    model_folder, make_drafter, make_config, name, kind
) -> None:
    """A random target, its states by one forward pass as policy training collects them."""
    folder = model_folder(kind, False, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    spec, device = model_spec(read_config(folder)), torch.device("cpu")
    trainer = DrafterTrainer(spec, DrafterConfig(method=name, learning_rate=3e-3, unroll=3), 1.0, device)
    trainer.load_head(read_target_head(folder, spec, device))
    start(trainer, make_drafter)
    g = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def collect(count: int) -> list[HiddenStates]:
        ids = torch.randint(0, 24, (count, 24), generator=g)
        hidden, aux = target_states(model.base_model, trainer.method.aux_layers, input_ids=ids)
        mask = torch.arange(24) >= 4
        return [HiddenStates(ids[i], hidden[i], mask, 0, None if aux is None else aux[i]) for i in range(count)]

    unseen = collect(8)
    before = trainer.estimate("before", trainer.state()["tensors"], unseen)
    for _ in range(60):
        trainer.train_micro_step(collect(16))
    after = trainer.estimate("after", trainer.state()["tensors"], unseen)
    assert all(b > a + 0.05 for a, b in zip(before.per_depth, after.per_depth, strict=True))
    assert after.acceptance_length > before.acceptance_length + 0.2


@METHODS
def test_estimate_agrees_with_training_and_leaves_the_drafter_alone(
    make_trainer, make_drafter, make_states, name
) -> None:
    trainer = start(make_trainer(temperature=0.8, method=name), make_drafter)
    states = make_states((3, 9), (2, 20), (4, 2), name=name)
    own = trainer.state()
    other = make_drafter(trainer.method, seed=9).tensors()
    estimate = trainer.estimate("own", own["tensors"], states)
    assert trainer.estimate("other", other, states).per_depth != estimate.per_depth
    assert all(
        torch.equal(a, b) for a, b in zip(own["tensors"].values(), trainer.state()["tensors"].values(), strict=True)
    )
    assert trainer.train_micro_step(states).expected_acceptance == pytest.approx(estimate.per_depth, rel=1e-5)


@pytest.mark.parametrize(("name", "split"), [("eagle", 0), ("eagle", 1), ("eagle", 3), ("eagle", 6), ("eagle3", 3)])
def test_state_moved_to_another_trainer_goes_on_bit_for_bit(
    make_trainer, make_drafter, make_states, name, split
) -> None:
    batches = [make_states((3, 9), (2, 5 + k), seed=k, name=name) for k in range(6)]
    alone = start(make_trainer(method=name), make_drafter)
    here = start(make_trainer(method=name), make_drafter)
    expected = [alone.train_micro_step(b) for b in batches]
    found = [here.train_micro_step(b) for b in batches[:split]]
    there = make_trainer(method=name)
    there.train_micro_step(make_states((3, 9), name=name))  # whatever it did before must not matter
    there.load_state(pickle.loads(pickle.dumps(here.state())))
    found += [there.train_micro_step(b) for b in batches[split:]]
    assert found == expected
    a, b = alone.state(), there.state()
    assert (a["total_steps"], a["updates"]) == (b["total_steps"], b["updates"]) == (6, 6)
    for x, y in ((a["tensors"], b["tensors"]), *((a["optimizer"][m], b["optimizer"][m]) for m in a["optimizer"])):
        assert x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def test_a_state_is_a_copy(make_trainer, make_drafter, make_states) -> None:
    trainer = start(make_trainer(), make_drafter)
    trainer.train_micro_step(make_states((3, 9)))
    state = trainer.state()
    kept = pickle.loads(pickle.dumps(state))
    trainer.train_micro_step(make_states((3, 9)))
    other = make_trainer()
    other.load_state(state)
    other.train_micro_step(make_states((3, 9)))
    for part in (state["tensors"], *state["optimizer"].values()):
        same = kept["tensors"] if part is state["tensors"] else None
        assert same is None or all(torch.equal(part[n], same[n]) for n in part)
    assert all(
        torch.equal(state["optimizer"][m][n], kept["optimizer"][m][n])
        for m in kept["optimizer"]
        for n in kept["tensors"]
    )


def test_a_state_that_is_held_is_not_copied_again_and_one_that_was_trained_on_is(
    make_trainer, make_drafter, make_states
) -> None:
    trainer = start(make_trainer(), make_drafter)
    trainer.train_micro_step(make_states((3, 9)))
    state = trainer.state()
    kept = copy.deepcopy(state)
    state["tensors"]["fc.weight"].zero_()  # would be noticed if it were copied in
    trainer.load_state(state)
    assert torch.equal(trainer.state()["tensors"]["fc.weight"], kept["tensors"]["fc.weight"])
    trainer.train_micro_step(make_states((3, 9)))
    assert trainer.state()["stamp"] != kept["stamp"]
    trainer.load_state(kept)
    again = trainer.state()
    assert again["total_steps"] == kept["total_steps"] == 1 and again["stamp"] == kept["stamp"]
    for name, tensor in kept["tensors"].items():
        assert torch.equal(again["tensors"][name], tensor)


@pytest.mark.parametrize("fault", ["renamed", "shape", "missing", "nan", "moments", "no moments", "moment shape"])
def test_a_state_that_does_not_fit_changes_nothing(make_trainer, make_drafter, make_states, fault) -> None:
    """Row 30 on the drafter's side."""
    trainer = start(make_trainer(), make_drafter)
    trainer.train_micro_step(make_states((3, 9)))
    before, bad = trainer.state(), trainer.state()
    bad["stamp"] = "another state's"
    tensors, optimizer = bad["tensors"], bad["optimizer"]
    if fault == "renamed":
        bad["tensors"] = {f"model.{n}": t for n, t in tensors.items()}
    elif fault == "shape":
        tensors["fc.weight"] = torch.zeros(64, 128)
    elif fault == "missing":
        del tensors["layers.0.mlp.up_proj.weight"]
    elif fault == "nan":
        tensors["fc.weight"][0, 0] = math.nan
    elif fault == "moments":
        bad["updates"] = 0
    elif fault == "no moments":
        bad["optimizer"] = {"exp_avg": {}, "exp_avg_sq": {}}
    else:
        optimizer["exp_avg"]["fc.weight"] = torch.zeros(3)
    with pytest.raises(WeightError, match="nothing changed"):
        trainer.load_state(bad)
    after = trainer.state()
    assert all(torch.equal(before["tensors"][n], after["tensors"][n]) for n in before["tensors"])
    assert after["updates"] == 1


def test_nothing_to_learn_is_no_update(make_trainer, make_drafter, make_states) -> None:
    trainer = start(make_trainer(), make_drafter)
    for states in ([], make_states((5, 0)), make_states((1, 1), (0, 1))):
        step = trainer.train_micro_step(states)
        assert not step.updated and step.loss == 0.0 and step.num_tokens == 0
    assert trainer.updates == 0 and trainer.state()["optimizer"]["exp_avg"] == {}


def test_non_finite_gradient_changes_nothing(make_trainer, make_drafter, make_states) -> None:
    trainer = start(make_trainer(), make_drafter)
    (state,) = make_states((3, 9))
    state.hidden[5] = math.inf
    before = trainer.state()
    assert not trainer.train_micro_step([state]).updated
    assert all(torch.equal(before["tensors"][n], t) for n, t in trainer.state()["tensors"].items())


@pytest.mark.parametrize(
    ("name", "states", "message"),
    [
        ("eagle", {"hidden": 16}, "size 16 reached a drafter of size 32"),
        ("eagle", {"name": "eagle3"}, r"size 96 reached a drafter of size 32 \(EAGLE, which reads the target's last"),
        ("eagle3", {"name": "eagle3", "hidden": 16}, "size 16 reached a drafter of size 32"),
        ("eagle3", {}, r"size 32 reached a drafter of size 96 \(EAGLE-3, which reads the outputs of the target's"),
    ],
)
def test_states_of_another_target_or_method_are_refused(
    make_trainer, make_drafter, make_states, name, states, message
) -> None:
    with pytest.raises(BatchError, match=message):
        start(make_trainer(method=name), make_drafter).train_micro_step(make_states((3, 9), **states))


def test_a_state_of_the_other_method_is_refused(make_trainer, make_drafter) -> None:
    trainer = start(make_trainer(), make_drafter)
    with pytest.raises(WeightError, match="drafter load refused, nothing changed"):
        trainer.load_state(start(make_trainer(method="eagle3"), make_drafter).state())


@EVERY_LOSS
@METHODS
def test_policy_gradient_is_zero_through_a_live_model(make_trainer, make_drafter, make_states, name, loss) -> None:
    """Row 29, the whole kind: hidden states that still hang on the policy's graph, a head that is a live parameter."""
    trainer, (state,) = start(make_trainer(method=name, loss=loss), make_drafter), make_states((3, 9))
    policy = torch.nn.Linear(32, 32)
    head = TargetHead(torch.nn.Parameter(trainer.head.embed), torch.nn.Parameter(trainer.head.head), 0)
    trainer.load_head(head)
    hidden = policy(state.hidden)
    aux = torch.cat([hidden, hidden, hidden], -1) if name == "eagle3" else None
    live = HiddenStates(state.input_ids, hidden, state.loss_mask, 0, aux)
    assert trainer.train_micro_step([live]).updated
    assert policy.weight.grad is None and policy.bias.grad is None
    assert head.embed.grad is None and head.head.grad is None


def test_a_sequence_longer_than_a_pack_is_trained_whole(make_trainer, make_drafter, make_states) -> None:
    trainer = start(make_trainer(pack_tokens=64), make_drafter)
    assert trainer.train_micro_step(make_states((3, 97))).num_tokens == 99


def test_forward_and_backward_passes_use_the_gpu_s_tensor_cores(
    monkeypatch, make_trainer, make_drafter, make_states
) -> None:
    """Played on a CPU by telling torch so: what precision the passes find is what is asked."""
    found = []

    def passes(*arguments, **more):
        found.append(torch.get_float32_matmul_precision())
        out = unroll(*arguments, **more)
        if out[-1].requires_grad:
            out[-1].register_hook(lambda _: found.append(torch.get_float32_matmul_precision()))
        return out

    trainer, states = start(make_trainer(), make_drafter), make_states((3, 9), (4, 5))
    monkeypatch.setattr("services.drafter.trainer.unroll", passes)
    monkeypatch.setattr("services.drafter.trainer.tensor_cores", lambda _: tensor_cores(torch.device("cuda")))
    trainer.train_micro_step(states)
    assert found == ["high", "high"]
    trainer.estimate("live", make_drafter(trainer.method).tensors(), states)
    assert found[2:] and {*found} == {"high"} and torch.get_float32_matmul_precision() == "highest"


def test_no_head_no_training(make_spec, make_states, make_trainer, make_drafter) -> None:
    trainer = DrafterTrainer(make_spec(), make_trainer().config, 1.0, torch.device("cpu"))
    start(trainer, make_drafter)
    with pytest.raises(WeightError, match="load_target_head"):
        trainer.train_micro_step(make_states((3, 9)))


def test_the_configured_weights_reach_the_loss(make_trainer, make_drafter, make_states) -> None:
    own = {"loss": "total_variation", "feature_weight": 0.2, "acceptance_ce_weight": 0.1}
    changes = ({}, {"loss": "acceptance_likelihood"}, {"feature_weight": 0.4}, {"acceptance_ce_weight": 0.0})
    losses = [
        start(make_trainer(**own | change), make_drafter).train_micro_step(make_states((3, 9))).loss
        for change in changes
    ]
    assert len(set(losses)) == len(losses)


@METHODS
def test_training_from_the_disk_is_training_from_memory(tmp_path, make_trainer, make_drafter, make_head, name) -> None:
    """Bit for bit: where a sequence waits must not matter to two slots that got equal chunks."""
    states = learnable(make_head, name)
    size = max(s.num_bytes for s in states)
    spilled = HiddenStateBuffer(size, None, SpillFolder(tmp_path, 2**24))
    found = []
    for buffer in (HiddenStateBuffer(2**24), spilled):
        buffer.add(states)
        trainer = start(make_trainer(method=name), make_drafter)
        for k in range(4):
            trainer.train_micro_step(buffer.sample(100, random.Random(k)))
        found.append(trainer.state()["tensors"])
    assert spilled.num_spilled == len(states) - 1
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
