"""What many sharded weights are whole: exactly what each is by itself, in far fewer calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from services.policy import gather
from services.policy.gather import gathered
from services.policy.team import Team
from tests.services.policy.teams import Case, in_team, new_trainer

# Rows that divide among the workers and do not, fewer rows than workers, vectors, an empty one.
SHAPES = [(7, 5), (8,), (1, 3), (2, 2, 2), (1,), (0, 4), (12, 6), (5,), (3, 1)]
FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BUCKETS = (1, 150, 2**20)


def plain(seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g) for shape in SHAPES]


def found(team: Team) -> dict[tuple[torch.dtype, int], tuple[list[Tensor], int]]:
    """By number format and size of a bucket: what came, and in how many collective calls."""
    assert team.mesh is not None
    sharded = [distribute_tensor(t, team.mesh, [Shard(0)], src_data_rank=None) for t in plain()]
    calls, real, results = [0], dist.all_gather, {}

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return real(*args, **kwargs)

    gather.dist.all_gather = counted  # type: ignore[attr-defined]
    for dtype in FORMATS:
        for size in BUCKETS:
            gather.BUCKET_BYTES, calls[0] = size, 0
            results[dtype, size] = list(gathered(sharded, dtype, team.leads)), calls[0]
    return results


def published(team: Team) -> tuple[list[Tensor], list[Tensor]]:
    """Of a policy's parameters: one by one and together."""
    parameters = [p.detach() for p in new_trainer(Case(), team).model.parameters()]
    return [p.full_tensor().bfloat16() for p in parameters], list(gathered(parameters, torch.bfloat16, team.leads))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_is_what_it_is_by_itself(tmp_path: Path, size: int) -> None:
    first, *others = in_team(size, tmp_path, found)
    for (dtype, bucket), (tensors, calls) in first.items():
        for mine, exact in zip(tensors, plain(), strict=True):
            assert mine.dtype == dtype and mine.shape == exact.shape
            assert torch.equal(mine, exact.to(dtype)), (dtype, bucket, exact.shape)
        assert calls == {1: len(SHAPES), 2**20: 1}.get(bucket, calls) and 1 <= calls <= len(SHAPES)
    for other in others:
        assert all(not tensors for tensors, _ in other.values()), "the one that leads has them"
        assert {key: calls for key, (_, calls) in other.items()} == {key: calls for key, (_, calls) in first.items()}


@pytest.mark.timeout(300)
def test_a_policys_are_what_they_are_one_by_one(tmp_path: Path) -> None:
    (one_by_one, together), (_, nothing) = in_team(2, tmp_path, published)
    assert not nothing
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, together, strict=True))


def test_what_is_whole_is_copied_where_it_is_wanted() -> None:
    tensors = plain()
    for dtype in FORMATS:
        copies = list(gathered(tensors, dtype, leads=True))
        assert all(torch.equal(c, t.to(dtype)) for c, t in zip(copies, tensors, strict=True))
        assert not {c.data_ptr() for c in copies if c.numel()} & {t.data_ptr() for t in tensors}
        assert not list(gathered(tensors, dtype, leads=False))


def test_nothing_gathers_to_nothing() -> None:
    assert not list(gathered([], torch.float32, leads=True))
