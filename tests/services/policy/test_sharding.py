"""A policy that two workers train between them is the policy that one trains: losses, gradients, states, weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from services.config.policy import Cispo, CorrectionConfig, Dapo, DrGrpo, Grpo, Gspo, Rloo
from services.policy.sharding import like_shards_of
from services.policy.team import ALONE, Team
from tests.services.policy.teams import Case, Outcome, batch, in_team, new_trainer, outcome_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKERS = 2
BUDGETS = (64, 4096)
ALGORITHMS = {
    "grpo": Grpo(), "dr_grpo": DrGrpo(), "dapo": Dapo(), "gspo": Gspo(), "cispo": Cispo(), "rloo": Rloo(),
}  # fmt: skip
CASES = {
    **{
        f"{name} {budget}": Case({"algorithm": algorithm, "micro_batch_tokens": budget, "kl_coef": 0.1})
        for name, algorithm in ALGORITHMS.items()
        for budget in BUDGETS
    },
    "dapo 96": Case({"micro_batch_tokens": 96, "kl_coef": 0.1}),
    "untied": Case(tied=False),
    "aux": Case(aux_layers=(0, 1), policy={"micro_batch_tokens": 64}),
    "recomputed": Case({"activation_checkpointing": True, "micro_batch_tokens": 64}, aux_layers=(0, 1)),
    "corrected": Case({"correction": CorrectionConfig(level="geometric", mode="mask", low=0.35, high=10.0)}),
    "several updates": Case({"updates_per_step": 2, "inner_epochs": 2, "micro_batch_tokens": 64}, steps=2),
    "a step of nothing": Case(steps=3, spoil=2),
    "no signal": Case(steps=2, silent=2),
    "gathered": Case({"reshard_after_forward": False, "micro_batch_tokens": 64, "kl_coef": 0.1}, aux_layers=(0, 1)),
    "gathered, recomputed": Case({"reshard_after_forward": False, "activation_checkpointing": True}),
    "gathered, several updates": Case(
        {"reshard_after_forward": False, "updates_per_step": 2, "inner_epochs": 2, "micro_batch_tokens": 64}, steps=2
    ),
    "gathered, no signal": Case({"reshard_after_forward": False}, steps=2, silent=2),
}
WITH_STATES = (
    "dapo 64", "aux", "recomputed", "several updates", "a step of nothing", "gathered", "gathered, no signal",
)  # fmt: skip
# No ratio: a token at the edge of a clip would be in or out of the gradient by a rounding.
HALF = Case(compute=torch.bfloat16, policy={"micro_batch_tokens": 64, "algorithm": Rloo()})


def everything(team: Team, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {name: outcome_of(case, team) for name, case in CASES.items()}
    return found | {"bfloat16": outcome_of(HALF, team), "handed on": handed_on(team, state)}


def handed_on(team: Team, state: dict[str, torch.Tensor]) -> Outcome:
    """A step after one worker's checkpoint, by this team."""
    made = new_trainer(Case(), team)
    made.load_state(state, 1)
    report = made.train_step(batch(2)).report
    return Outcome([report], state=made.state())


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    return {name: outcome_of(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def kept() -> dict[str, torch.Tensor]:
    """What one worker has after a step."""
    first = new_trainer(Case())
    first.train_step(batch(1))
    return first.state()


@pytest.fixture(scope="module")
def both(kept: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return in_team(WORKERS, tmp_path_factory.mktemp("team"), everything, kept)


COMPARED = (
    "loss",
    "grad_norm",
    "kl",
    "clip_fraction",
    "logprob_gap",
    "mismatch_kl",
    "entropy",
    "surprise",
    "surprise_errors",
)


@pytest.mark.parametrize("name", CASES)
def test_two_workers_compute_what_one_does(
    name: str, alone: dict[str, Outcome], both: list[dict[str, Outcome]]
) -> None:
    one, two = alone[name], both[0][name]
    assert len(one.gradients) == len(two.gradients) > 0
    later = 1e-4  # AdamW's first updates go by the sign of a gradient, however small it is
    for number, (mine, other) in enumerate(zip(one.gradients, two.gradients, strict=True)):
        assert mine.norm() > 1e-3 and (mine - other).norm() <= (later if number else 1e-6) * mine.norm()
    tolerance = 1e-6 if len(one.gradients) == 1 else later
    for ours, theirs in zip(one.reports, two.reports, strict=True):
        for key in COMPARED:
            assert getattr(theirs, key) == pytest.approx(getattr(ours, key), rel=tolerance, abs=1e-7), key
        assert (theirs.num_tokens, theirs.policy_version) == (ours.num_tokens, ours.policy_version)
        assert (theirs.warnings, theirs.corrected_fraction) == (ours.warnings, ours.corrected_fraction)


@pytest.mark.parametrize("name", WITH_STATES)
def test_the_worker_that_leads_has_every_rollouts_states(
    name: str, alone: dict[str, Outcome], both: list[dict[str, Outcome]]
) -> None:
    for ours, theirs in zip(alone[name].hidden, both[0][name].hidden, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.loss_mask, b.loss_mask)
            torch.testing.assert_close(a.hidden, b.hidden, atol=1e-4, rtol=1e-4)
            assert (a.aux is None) == (b.aux is None) and a.policy_version == b.policy_version
            if a.aux is not None:
                torch.testing.assert_close(a.aux, b.aux, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_have_one_form(name: str, alone: dict[str, Outcome], both: list[dict[str, Outcome]]) -> None:
    one, two = alone[name].state, both[0][name].state
    assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in two.items()}
    assert any(n.startswith("optimizer/exp_avg_sq/") for n in two)
    for key in ("exp_avg", "step"):
        moments = [n for n in one if n.startswith(f"optimizer/{key}/")]
        mine, other = (torch.cat([s[n].flatten() for n in moments]) for s in (one, two))
        assert (mine - other).norm() <= 1e-4 * mine.norm()
    assert both[1][name].state == {}, "only the worker that leads holds copies"


@pytest.mark.parametrize("name", CASES)
def test_workers_make_as_many_passes_as_each_other(name: str, both: list[dict[str, Outcome]]) -> None:
    assert both[0][name].passes == both[1][name].passes > 0


def test_a_batch_that_fits_one_pack_is_still_divided(alone: dict[str, Outcome], both: list[dict[str, Outcome]]) -> None:
    assert (alone["dapo 4096"].passes, both[0]["dapo 4096"].passes) == (2, 2), "the group without signal is one"
    assert len(both[1]["dapo 4096"].reports) == 1 and both[1]["dapo 4096"].reports[0].entropy > 0


def test_bfloat16_keeps_masters_in_float32(both: list[dict[str, Outcome]]) -> None:
    """The weights are gathered in bfloat16; what is kept moves by less than a bfloat16 step."""
    two, one = both[0]["bfloat16"], outcome_of(HALF)
    assert all(t.dtype == torch.float32 for n, t in two.state.items() if not n.startswith("optimizer/step"))
    assert math.isfinite(two.reports[0].loss) and two.reports[0].policy_version == 1
    assert two.reports[0].entropy == pytest.approx(one.reports[0].entropy, rel=0.02)
    mine, other = one.gradients[0], two.gradients[0]
    assert torch.nn.functional.cosine_similarity(mine, other, dim=0) > 0.999


def test_a_run_goes_on_with_another_number_of_workers(
    kept: dict[str, torch.Tensor], both: list[dict[str, Outcome]]
) -> None:
    """From one worker's checkpoint, and back from what two made of it."""
    one, two = handed_on(ALONE, kept), both[0]["handed on"]
    assert two.reports[0].loss == pytest.approx(one.reports[0].loss, rel=1e-6)
    assert two.reports[0].grad_norm == pytest.approx(one.reports[0].grad_norm, rel=1e-6)
    third = new_trainer(Case())
    third.load_state(two.state, 2)
    assert all(torch.equal(t, two.state[n]) for n, t in third.state().items())
    assert third.train_step(batch(3)).report.policy_version == 3


def test_shards_in_host_memory_of_gpus_stay_there() -> None:
    """Of a policy that left its GPU, and of offloaded weights into which a checkpoint is read. `from_local` wants a GPU
    here."""
    mesh = DeviceMesh("cuda", torch.arange(1), _init_backend=False, _rank=0)
    value = torch.arange(6.0).reshape(2, 3)
    layout = DTensorSpec(mesh, (Shard(0),), TensorMeta(value.shape, value.stride(), value.dtype))
    found = like_shards_of(DTensor(torch.zeros(2, 3), layout, requires_grad=False), value)
    assert found.to_local().device.type == "cpu" and torch.equal(found.to_local(), value)
    assert (found.shape, found.placements, found.device_mesh) == (value.shape, layout.placements, mesh)
