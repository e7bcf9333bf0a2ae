"""A policy that leaves its device between steps is the policy that stays there, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.policy.residence import Residence, movable
from services.policy.team import ALONE, Team
from services.policy.trainer import PolicyTrainer
from tests.services.policy.teams import Case, batch, in_team, new_trainer

CPU = torch.device("cpu")
WITH_REFERENCE = Case({"kl_coef": 0.1, "micro_batch_tokens": 64})
STEPS = 3


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def held(trainer: PolicyTrainer) -> int:
    """Bytes of what the trainer keeps between steps."""
    tensors = list(trainer._tensors())
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in local)}.values())


def commuting(team: Team = ALONE) -> dict[str, Any]:
    """Away after every step; what it says of itself while it is away and when it is back."""
    made = new_trainer(WITH_REFERENCE, team)
    found: dict[str, Any] = {"losses": [], "away": [], "back": [], "bytes": []}
    for number in range(1, STEPS + 1):
        found["losses"].append(made.train_step(batch(number)).report.loss)
        before = held(made)
        moved = made.residence.leave()
        found["bytes"].append((before, moved, held(made)))
        found["away"].append(made.state())
        assert made.residence.come_back() == moved and held(made) == before
        found["back"].append(made.state())
    return found


def staying(team: Team = ALONE) -> dict[str, Any]:
    made = new_trainer(WITH_REFERENCE, team)
    found: dict[str, Any] = {"losses": [], "states": []}
    for number in range(1, STEPS + 1):
        found["losses"].append(made.train_step(batch(number)).report.loss)
        found["states"].append(made.state())
    return found


def beginning(team: Team = ALONE) -> dict[str, Any]:
    """One trainer that begins away, and goes on as an earlier one; another is given that one's state while away."""
    made = new_trainer(WITH_REFERENCE, team, away=True)
    found: dict[str, Any] = {"held": [held(made)], "states": [made.state()], "losses": []}
    made.residence.come_back()
    for number in range(1, STEPS):
        found["losses"].append(made.train_step(batch(number)).report.loss)
    state, resumed = made.state(), new_trainer(WITH_REFERENCE, team, away=True)
    resumed.load_state(everybodys(team, state), made.version)
    found["held"].append(held(resumed))
    found["states"].append(resumed.state())
    resumed.residence.come_back()
    found["losses"].append(resumed.train_step(batch(STEPS)).report.loss)
    found["states"].append(resumed.state())
    return found


def everybodys(team: Team, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the worker that leads, which alone has it: a checkpoint is read by all."""
    shared: list[Any] = [state]
    if team.size > 1:
        dist.broadcast_object_list(shared, src=0)
    return dict(shared[0])


def first_state(team: Team = ALONE) -> dict[str, Tensor]:
    return new_trainer(WITH_REFERENCE, team).state()


def check_beginning(begun: dict[str, Any], first: dict[str, Tensor], stayed: dict[str, Any]) -> None:
    assert begun["losses"] == stayed["losses"]
    for state, other in zip(begun["states"], [first, *stayed["states"][-2:]], strict=True):
        assert equal(state, other)


def beginning_and_staying(team: Team) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    return beginning(team), first_state(team), staying(team)


def both(team: Team) -> tuple[dict[str, Any], dict[str, Any]]:
    return commuting(team), staying(team)


def check(away: dict[str, Any], stayed: dict[str, Any]) -> None:
    assert away["losses"] == stayed["losses"]
    for there, back, state in zip(away["away"], away["back"], stayed["states"], strict=True):
        assert equal(there, state), "read while it was away"
        assert equal(back, state)


def test_training_is_the_same_and_the_memory_is_given_up() -> None:
    away, stayed = commuting(), staying()
    check(away, stayed)
    assert any(name.startswith("optimizer/") for name in stayed["states"][0])
    for before, moved, left in away["bytes"]:
        assert before == moved > 0
        assert left == 0, "weights, moments and the reference are gone from the device"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shards_of_two_workers_leave_and_come_back(tmp_path: Path) -> None:
    (away, stayed), (second, _) = in_team(2, tmp_path, both)
    check(away, stayed)
    assert all(before == moved and left == 0 for before, moved, left in second["bytes"])


def test_one_that_begins_away_and_one_that_is_restored_away_are_the_same_trainer() -> None:
    begun = beginning()
    check_beginning(begun, first_state(), staying())
    assert begun["held"] == [0, 0], "nothing of it has been on the device when it is built"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shards_of_two_workers_begin_away(tmp_path: Path) -> None:
    first, second = in_team(2, tmp_path, beginning_and_staying)
    check_beginning(*first)
    assert first[0]["held"] == second[0]["held"] == [0, 0]


def test_what_has_left_ahead_is_not_copied_again_and_comes_back_with_the_rest() -> None:
    ahead, rest = torch.ones(4), torch.full((4,), 2.0)
    house = Residence(lambda: [ahead, rest], CPU)
    house.send([ahead])
    assert not ahead.untyped_storage().nbytes() and rest.tolist() == [2.0] * 4
    house.at_hand(ahead)[0] = 5.0
    assert house.leave() == ahead.numel() * 4 + rest.numel() * 4
    house.come_back()
    assert ahead.tolist() == [5.0, 1.0, 1.0, 1.0] and rest.tolist() == [2.0] * 4


def test_tensors_that_share_memory_are_moved_once_and_still_share_it() -> None:
    whole = torch.arange(12.0)
    part = whole[3:7]
    house = Residence(lambda: [whole, part], CPU)
    assert house.leave() == whole.nbytes
    assert torch.equal(house.at_hand(part), torch.arange(3.0, 7.0))
    house.come_back()
    part[0] = -1.0
    assert whole[3] == -1.0


def test_a_return_that_was_cut_short_goes_on_with_the_rest() -> None:
    first, second = torch.ones(4), torch.full((4,), 2.0)
    house = Residence(lambda: [first, second], CPU)
    house.leave()
    first.untyped_storage().resize_(16)
    first.fill_(1.0)  # came back before the memory ran out
    house.come_back()
    assert first.tolist() == [1.0] * 4 and second.tolist() == [2.0] * 4


def test_host_memory_of_tensors_that_are_gone_is_given_up() -> None:
    """Their storages' addresses may be others' by then."""
    tensors = [torch.ones(4), torch.full((4,), 2.0)]
    house = Residence(lambda: tensors, CPU)
    house.leave()
    house.come_back()
    tensors[1] = torch.full((8,), 3.0)
    house.leave()
    assert sorted(copy.nbytes for copy in house._host.values()) == [16, 32]
    assert house.at_hand(tensors[1]).tolist() == [3.0] * 8


def test_what_is_not_on_the_device_stays_where_it_is() -> None:
    tensor = torch.ones(3)
    house = Residence(lambda: [tensor], torch.device("cuda"))
    assert list(house._owned([tensor])) == []


def test_a_tensor_of_a_file_that_is_read_in_place_is_copied(tmp_path: Path) -> None:
    save_file({"a": torch.arange(5.0)}, tmp_path / "a.safetensors")
    tensor = movable(load_file(tmp_path / "a.safetensors")["a"])
    house = Residence(lambda: [tensor], CPU)
    house.leave()
    house.come_back()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
