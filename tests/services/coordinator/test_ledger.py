from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.ledger import Ledger
from services.coordinator.work import make_work
from services.core.types import AcceptanceStats, FinishReason, GroupWork, PartialRollout, Rollout
from tests.services.coordinator.fakes import SAMPLING, make_prompts


def rollout(work: GroupWork, index: int, reason: FinishReason = FinishReason.STOP) -> Rollout:
    seed = work.seeds[work.indices.index(index)]
    return Rollout(
        work.group_id, work.prompt.id, index, seed, (1,), (2,), (0.0,), "", reason, SAMPLING, (0,), (0,),
        AcceptanceStats(),
    )  # fmt: skip


def partial(work: GroupWork, index: int, tokens: int = 3) -> PartialRollout:
    return PartialRollout(
        work.group_id, index, (2,) * tokens, (0.0,) * tokens, (0,), (0,), AcceptanceStats(), 0.0
    )  # fmt: skip


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 5))
def test_any_order_of_losses_moves_and_late_duplicates_gives_each_rollout_once(
    seed: int, groups: int, size: int
) -> None:
    rng = random.Random(seed)
    works = make_work(make_prompts(groups), "s", size, SAMPLING, 0)
    ledger = Ledger(works)
    out: list[tuple[int, GroupWork, int]] = []  # every copy a server ever got: lost ones may still report
    finished = []
    for _ in range(2000):
        if ledger.complete:
            break
        choice = rng.random()
        if choice < 0.4 and ledger.pending:
            work, slot = rng.choice(ledger.pending), rng.randrange(3)
            ledger.assign(work, slot)
            out += [(slot, work, i) for i in work.indices]
        elif choice < 0.5:
            slot = rng.randrange(3)
            held = ledger.held(slot)
            assert len(held) == ledger.outstanding(slot)
            if rng.random() < 0.5:
                ledger.lose(slot)
            else:
                some = frozenset(k for k in held if rng.random() < 0.5) | {("of another phase", 0)}
                assert ledger.give_up(slot, some) == len(some & held) and ledger.held(slot) == held - some
        elif choice < 0.65 and out:
            source, destination = rng.randrange(3), rng.choice([0, 1, 2, None])
            some = rng.sample(out, rng.randint(1, len(out)))  # of other servers, finished or lost ones among them
            handed = [
                partial(w, i, rng.randrange(4)) for w, i in {(w.group_id, i): (w, i) for _, w, i in some}.values()
            ]
            before = {s: ledger.outstanding(s) for s in range(3)}
            for again in ledger.move(handed, source, destination):
                assert all(p in handed for p in again.partials)
                out += [(destination, again, i) for i in again.indices]
            if destination is not None:
                assert sum(before.values()) == sum(ledger.outstanding(s) for s in range(3))
        elif out:
            slot, work, index = rng.choice(out)  # may be a repeat
            reason = FinishReason.ABORT if rng.random() < 0.1 else FinishReason.STOP
            ledger.record(rollout(work, index, reason), slot)
        ledger.check_integrity()
        finished += ledger.take_finished()
    assert ledger.complete and ledger.recorded == ledger.total == groups * size
    assert sorted(f.group_id for f in finished) == [w.group_id for w in works]
    for done, work in zip(sorted(finished, key=lambda f: f.group_id), works, strict=True):
        assert [r.index for r in done.rollouts] == list(range(size))
        assert tuple(r.seed for r in done.rollouts) == work.seeds, "a re-dispatch changed a seed"
    assert ledger.pending == ()


def test_a_loss_queues_only_the_missing_indices_with_their_seeds_first_in_line() -> None:
    first, second = make_work(make_prompts(2), "s", 4, SAMPLING, 0)
    ledger = Ledger([first, second])
    ledger.assign(first, 1)
    ledger.record(rollout(first, 2), 1)
    assert ledger.outstanding(1) == 3
    assert ledger.lose(1) == 3
    again, rest = ledger.pending
    assert (again.group_id, again.indices) == (first.group_id, (0, 1, 3)) and rest == second
    assert again.seeds == (first.seeds[0], first.seeds[1], first.seeds[3])
    assert not ledger.record(rollout(first, 2), 1) and ledger.duplicates == 1


def test_what_was_withdrawn_goes_on_wherever_it_ends_up() -> None:
    (work,) = make_work(make_prompts(1), "s", 4, SAMPLING, 0)
    ledger = Ledger([work])
    ledger.assign(work, 0)
    ledger.record(rollout(work, 1), 0)
    known = partial(work, 2)
    (moved,) = ledger.move([known, partial(work, 1), partial(work, 3, 0)], 0, 1)
    assert (moved.indices, moved.seeds, moved.partials) == ((2, 3), work.seeds[2:], (known,))
    assert ledger.outstanding(0) == 1 and ledger.outstanding(1) == 2
    assert ledger.move([known], 0, 1) == [], "the source does not have it any more"
    assert ledger.lose(1) == 2
    (again,) = ledger.pending
    assert again == moved
    ledger.assign(again, 2)
    assert ledger.record(rollout(work, 2), 2) and not ledger.record(rollout(work, 2), 1) and ledger.duplicates == 1
    assert ledger.move([partial(work, 0)], 0, None) == []
    assert [w.indices for w in ledger.pending] == [(0,)] and ledger.pending[0].partials == (partial(work, 0),)
    assert ledger.work_of(f"{work.group_id}#2") == work and ledger.work_of("other/0#1") is None
    ledger.check_integrity()
