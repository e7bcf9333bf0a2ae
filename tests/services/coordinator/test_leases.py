from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.leases import HELD, NEXT, SERVING, LeaseBook
from services.core.errors import StaleEpochError
from services.core.types import SlotState

S = SlotState
ACTION = st.tuples(st.integers(0, 2), st.sampled_from(list(S)), st.integers(0, 3), st.floats(0.0, 3.0))


@given(st.lists(ACTION, max_size=60))
def test_any_history_keeps_the_invariants(history: list[tuple[int, SlotState, int, float]]) -> None:
    seen: list[tuple[SlotState, SlotState]] = []
    book = LeaseBook(3, 2.0, 0.0, lambda a, b, now: seen.append((a.state, b.state)))
    holders: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    now = 0.0
    for slot, state, behind, wait in history:
        now += wait
        before = book[slot]
        if behind and before.epoch - behind >= 0:
            with pytest.raises(StaleEpochError):
                book.change(slot, state, before.epoch - behind, now)
            with pytest.raises(StaleEpochError):
                book.renew(slot, before.epoch - behind, now)
            assert book[slot] == before
            continue
        if state not in NEXT[before.state]:
            with pytest.raises(AssertionError):
                book.change(slot, state, before.epoch, now)
            assert book[slot] == before
            continue
        after = book.change(slot, state, before.epoch, now)
        same_holder = {before.state, state} <= SERVING
        assert after.epoch == before.epoch + (0 if same_holder else 1)
        if state in HELD and not same_holder:
            assert after.epoch not in holders[slot], "two holders share an epoch"
            holders[slot].add(after.epoch)
        assert after.deadline_s == now + 2.0
        # One state per slot: no two roles at once.
        assert sum(slot in book.in_state(s) for s in S) == 1
    assert all(b in NEXT[a] for a, b in seen)
    for lease in map(book.__getitem__, range(3)):
        assert (lease.slot in book.expired(now)) == (lease.state in HELD and now > lease.deadline_s)


def test_a_former_holder_is_refused_and_a_lost_slot_returns() -> None:
    book = LeaseBook(1, 5.0, 0.0)
    rollout = book.change(0, S.ROLLOUT, 0, 1.0)
    draining = book.change(0, S.DRAINING, rollout.epoch, 2.0)
    assert draining.epoch == rollout.epoch
    assert book.expired(7.1) == [0]
    book.renew(0, rollout.epoch, 7.0)
    assert book.expired(7.1) == []
    lost = book.change(0, S.LOST, draining.epoch, 8.0)
    with pytest.raises(StaleEpochError, match="epoch 2, not 1"):
        book.renew(0, draining.epoch, 9.0)
    assert book.expired(1e9) == []  # a lost slot has nobody to expire
    assert book.change(0, S.IDLE, lost.epoch, 9.0).epoch == 3


def test_every_state_can_be_lost_and_left() -> None:
    for state in S:
        assert state is S.LOST or S.LOST in NEXT[state]
        assert NEXT[state]
