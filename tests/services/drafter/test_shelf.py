"""Versions appear whole, once, and in rising order, whoever puts them there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.core.errors import WeightError
from services.drafter.shelf import KEPT, Shelf, policy_mark
from services.drafter.state import read_drafter
from services.models.files import read_config
from services.weights.learning import NewDrafter


@pytest.fixture
def shelf(tmp_path: Path, make_method, model_folder) -> Shelf:
    return Shelf(tmp_path / "out", make_method(), read_config(model_folder()), "policy-3-ab")


@pytest.fixture
def tensors(make_method, make_drafter):
    def make(seed: int = 0):
        return {n: t.detach().clone() for n, t in make_drafter(make_method(), seed).tensors().items()}

    return make


def test_what_was_put_is_found_and_is_a_drafter_folder(shelf: Shelf, tmp_path: Path, make_method, tensors) -> None:
    assert shelf.newer(4) is None
    assert shelf.put(NewDrafter(5, tensors(1)), 7)
    found = shelf.newer(4)
    assert found is not None and found.version == 5
    assert all(torch.equal(found.tensors[n], t) for n, t in tensors(1).items())
    assert shelf.newer(5) is None
    folder = tmp_path / "out/policy-3-ab/drafter-5"
    assert read_drafter(folder, make_method()).keys() == tensors(1).keys()
    assert [p.name for p in folder.parent.iterdir()] == ["drafter-5"], "nothing half-written is left"


def test_of_many_who_make_one_version_one_does(shelf: Shelf, tensors) -> None:
    drafters = [NewDrafter(1, tensors(seed)) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda d: shelf.put(d, 0), drafters))
    assert won.count(True) == 1
    found = shelf.newer(0)
    assert found is not None
    mine = drafters[won.index(True)].tensors
    assert all(torch.equal(found.tensors[n], t) for n, t in mine.items()), "and it is the winner's, unmixed"


def test_a_number_is_never_given_twice_also_when_its_folder_is_gone(shelf: Shelf, tmp_path: Path, tensors) -> None:
    for version in range(1, KEPT + 3):
        assert shelf.put(NewDrafter(version, tensors(version)), 0)
    left = sorted(p.name for p in (tmp_path / "out/policy-3-ab").iterdir())
    assert left == [f"drafter-{n}" for n in range(3, KEPT + 3)]
    assert not shelf.put(NewDrafter(1, tensors(0)), 0) and not shelf.put(NewDrafter(KEPT + 2, tensors(0)), 0)


def test_another_policys_versions_are_not_seen(
    shelf: Shelf, tmp_path: Path, make_method, model_folder, tensors
) -> None:
    shelf.put(NewDrafter(9, tensors()), 0)
    assert Shelf(tmp_path / "out", make_method(), read_config(model_folder()), "policy-3-cd").newer(0) is None


def test_what_does_not_fit_is_not_put(shelf: Shelf, tensors, tmp_path: Path) -> None:
    wrong = {f"x.{n}": t for n, t in tensors().items()}
    with pytest.raises(WeightError):
        shelf.put(NewDrafter(1, wrong), 0)
    assert shelf.newer(0) is None


def test_the_mark_tells_policies_apart() -> None:
    policy = {"norm": torch.ones(4), "layer.norm": torch.zeros(4), "matrix": torch.randn(4, 4)}
    same = {**dict(reversed(policy.items())), "matrix": torch.randn(4, 4)}
    assert policy_mark(policy) == policy_mark(same) == policy_mark({n: t.bfloat16() for n, t in policy.items()})
    other = {**policy, "norm": torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-6])}
    swapped = {"norm": policy["layer.norm"], "layer.norm": policy["norm"]}
    assert len({policy_mark(p) for p in (policy, other, swapped)}) == 3
