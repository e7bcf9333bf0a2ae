"""Hidden states from SGLang's calls to the drafter's sequences, over an engine that schedules at random.

Its model's state of a position is a number that depends on the policy version and on every token up to there, so that a
shift, a mixture of versions or a foreign prefix is seen.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.core.errors import BatchError
from services.core.types import AcceptanceStats, FinishReason, HiddenStateChunk, Rollout, SamplingParams
from services.models.hidden import HiddenStates
from services.rollout.sglang.capture import StateCapture
from services.rollout.sglang.captured import SHARED_MEMORY, CapturedStates, capture_file, read_capture
from services.rollout.sglang.states import assemble

WIDTH, ENGINE, NONSENSE = 3, "SGLang 0.5.17", 99
ROOMY = 2**20
CPU = torch.device("cpu")


def state(version: int, ids: list[int]) -> list[float]:
    """[WIDTH], exact in float32."""
    number = hash((version, *ids))
    return [float((number >> 20 * i) % 2**20) for i in range(WIDTH)]


def states(version: int, ids: list[int], start: int) -> Tensor:
    return torch.tensor([state(version, ids[: n + 1]) for n in range(start, len(ids))]).reshape(-1, WIDTH)


@dataclass
class Life:
    """One request. `fed`: tokens whose keys and values the engine has; `ready`: all but the last of `ids`."""

    rid: str
    prompt: list[int]
    ids: list[int]
    total: int
    wanted: bool
    fed: int = 0
    version: int = 0
    ready: bool = False
    done: bool = False


@dataclass
class Random:
    """Prefills in chunks with prefix hits, verifications, discarded rounds, retractions, loads, stops, overshoot."""

    capture: StateCapture
    rng: random.Random
    width: int
    version: int = 0
    lives: list[Life] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)

    def name(self, life: Life) -> str | None:
        return life.rid if life.wanted else None

    def arrive(self) -> None:
        rng = self.rng
        prompt = [1, 2, 3][: rng.randint(1, 3)] + [rng.randrange(5) for _ in range(rng.randint(1, 6))]
        for n in range(rng.randint(1, 4)):
            rid = f"{len(self.lives)}/g#{n}"
            total = len(prompt) + rng.randint(1, 14)
            self.lives.append(Life(rid, prompt, list(prompt), total, rng.random() < 0.9))

    def hit(self, life: Life) -> int:
        same = [
            next((n for n, (a, b) in enumerate(zip(life.ids, c, strict=False)) if a != b), min(len(c), len(life.ids)))
            for c in self.cached
        ]
        return min(max(same, default=0), len(life.ids) - 1) if life.wanted else 0

    def prefill(self) -> None:
        waiting = [x for x in self.lives if not x.done and not x.ready]
        batch = self.rng.sample(waiting, min(len(waiting), self.rng.randint(1, 3)))
        if not batch:
            return
        starts, parts, ids, behind = [], [], [], []
        for life in batch:
            if not life.fed:
                life.fed, life.version = self.hit(life), self.version
            end = self.rng.randint(life.fed + 1, len(life.ids))
            starts.append(life.fed)
            parts.append(states(self.version, life.ids[:end], life.fed))
            ids += life.ids[life.fed : end]
            life.fed = end
            if life.wanted:
                self.cached.append(life.ids[:end])
            if end == len(life.ids):
                life.ready = True
                life.ids.append(self.rng.randrange(5))
                behind.append(life.ids[-1])
            else:
                behind.append(NONSENSE)
        counts = [len(p) for p in parts]
        names = [self.name(x) for x in batch]
        tensors = torch.cat(parts), torch.tensor(ids), torch.tensor(behind, dtype=torch.int32)
        self.capture.prefill(names, starts, counts, self.version, *tensors)
        self.end_some()

    def verify(self, batch: list[Life], emit: bool = True) -> None:
        if not batch:
            return
        rows = torch.full((len(batch), self.width, WIDTH), float("nan"))
        predicted = torch.full((len(batch), self.width), NONSENSE, dtype=torch.int32)
        accepted = []
        for row, life in enumerate(batch):
            count = self.rng.randint(1, self.width)
            ids = [*life.ids, *(self.rng.randrange(5) for _ in range(count))]
            rows[row, :count] = states(self.version, ids[:-1], life.fed)
            predicted[row, :count] = torch.tensor(ids[-count:])
            accepted.append(count)
            if emit:
                life.ids, life.fed = ids, life.fed + count
        roots = torch.tensor([x.fed - (n if emit else 0) for x, n in zip(batch, accepted, strict=True)])
        lengths = torch.tensor(accepted, dtype=torch.int32)
        names = [self.name(x) for x in batch]
        self.capture.decode(names, self.version, rows.flatten(0, 1), predicted.flatten(), lengths, roots)

    def running(self) -> list[Life]:
        return [x for x in self.lives if not x.done and x.ready]

    def round(self) -> None:
        self.verify(self.running())
        self.end_some()

    def end_some(self) -> None:
        """Stops may lie inside an accepted run; the round that was under way then goes beyond them."""
        ended = [x for x in self.running() if len(x.ids) >= x.total]
        if ended and self.rng.random() < 0.5:
            self.verify([replace(x, ids=list(x.ids)) for x in ended])
        for life in ended:
            life.ids, life.done = life.ids[: life.total], True

    def discard(self) -> None:
        """Memory runs out: the round under way is thrown away, and the request computed again."""
        running = self.running()
        if running:
            life = self.rng.choice(running)
            if self.rng.random() < 0.7:
                self.verify([life], emit=False)
            life.fed, life.ready = 0, False

    def load(self) -> None:
        self.version += 1
        self.cached.clear()
        for life in self.lives:
            if not life.done:
                life.fed, life.ready = 0, False

    def run(self, steps: int) -> None:
        actions = [self.arrive, self.prefill, self.prefill, self.round, self.round, self.round, self.discard, self.load]
        weights = [3, 6, 6, 6, 6, 6, 1, 0.4]
        for _ in range(steps):
            self.rng.choices(actions, weights)[0]()
        while not all(x.done for x in self.lives):
            self.prefill()
            self.round()


def rollout(life: Life) -> Rollout:
    response = tuple(life.ids[len(life.prompt) :])
    return Rollout(
        "g", "p", int(life.rid.split("#")[1]), 0, tuple(life.prompt), response, (0.0,) * len(response), "",
        FinishReason.LENGTH, SamplingParams(), (0,), (0,), AcceptanceStats(),
    )  # fmt: skip


def taken(capture: StateCapture) -> CapturedStates:
    with capture_file() as (path, descriptor):
        capture.take(path, ENGINE)
        return read_capture(descriptor)


def check_states(lives: list[Life], found: list[HiddenStates], version: int) -> None:
    by_ids: dict[tuple[int, ...], int] = {}
    for s in found:
        ids = s.input_ids.tolist()
        assert s.policy_version == version and torch.equal(s.hidden, states(version, ids, 0))
        by_ids[tuple(ids)] = int((~s.loss_mask).sum())
        assert s.loss_mask.tolist() == sorted(s.loss_mask.tolist())
    for ids, num_prompt in by_ids.items():
        assert any(tuple(x.ids[: len(ids)]) == ids and len(x.prompt) == num_prompt for x in lives)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), width=st.integers(1, 5), room=st.sampled_from([ROOMY, ROOMY, 6000, 2500, 400]))
@example(seed=2142, width=3, room=400)  # a full arena, and a batch in which nobody's states are wanted: nothing is lost
def test_every_state_is_the_positions_own(seed: int, width: int, room: int) -> None:
    capture = StateCapture(room, CPU)
    engine = Random(capture, random.Random(seed), width)
    for window in range(2):
        engine.lives, engine.cached = [], []  # another window: no prefix of the one before
        engine.arrive()
        engine.run(40)
        wanted = [x for x in engine.lives if x.wanted]
        finished = {x.rid: rollout(x) for x in wanted}
        captured = taken(capture)
        chunk, found = assemble(captured, finished, step=window, served=engine.version)
        check_states(wanted, found, chunk.policy_version)
        assert chunk.num_sequences == len(found) and chunk.step == window
        assert chunk.num_tokens == sum(len(s.input_ids) for s in found)
        assert (chunk.lost_bytes > 0) == bool(captured.cut or captured.void)
        if room == ROOMY:
            check_nothing_is_missing(chunk, wanted, found)


def check_nothing_is_missing(chunk: HiddenStateChunk, wanted: list[Life], found: list[HiddenStates]) -> None:
    """Everything that ended under the newest version, but what has no state of a response token."""
    newest = [x for x in wanted if x.version == max(y.version for y in wanted)]
    assert chunk.num_missing == len(wanted) - len(newest) and not chunk.lost_bytes
    got = [len(s.input_ids) for s in found]
    lengths = [len(x.ids) for x in newest if len(x.ids) - len(x.prompt) > 1]
    assert len(lengths) <= len(got) <= len(newest)
    assert all(any(n in (t, t - 1) for t in [len(x.ids) for x in newest]) for n in got)


# ------------------------------------------------------------------ single faults


def one_life(capture: StateCapture, count: int = 12, seed: int = 0) -> Life:
    engine = Random(capture, random.Random(seed), 3)
    life = Life("0/g#0", [1, 2, 3, 4], [1, 2, 3, 4], 4 + count, True)
    engine.lives.append(life)
    while not life.done:
        engine.prefill()
        engine.round()
    return life


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_of_other_tokens_are_an_error_that_names_the_version(shift: int) -> None:
    capture = StateCapture(ROOMY, CPU)
    life = one_life(capture)
    captured = taken(capture)
    moved = replace(captured, behind=np.roll(captured.behind, shift))
    with pytest.raises(BatchError, match=r"g#0: hidden states of SGLang 0\.5\.17 belong to other tokens.*set drafter"):
        assemble(moved, {life.rid: rollout(life)}, 1, 0)
    late = replace(captured, start=captured.start + 1)
    with pytest.raises(BatchError, match="belong to other tokens"):
        assemble(late, {life.rid: rollout(life)}, 1, 0)


def test_an_engine_that_keeps_nothing_is_an_error_and_without_rollouts_none() -> None:
    capture = StateCapture(ROOMY, CPU)
    life = one_life(StateCapture(ROOMY, CPU))
    with pytest.raises(BatchError, match="does not call the methods that this version of Longtail hooks"):
        assemble(taken(capture), {life.rid: rollout(life)}, 1, 0)
    assert assemble(taken(capture), {}, 4, 7) == (HiddenStateChunk(7, 4, 0, 0, 0), [])


def test_a_full_arena_keeps_what_it_has_and_says_what_was_lost() -> None:
    whole = StateCapture(ROOMY, CPU)
    life = one_life(whole)
    found = assemble(taken(whole), {life.rid: rollout(life)}, 1, 0)[1]
    small = StateCapture(260, CPU)
    one_life(small)
    captured = taken(small)
    assert captured.cut == {life.rid} and not captured.void and captured.lost_bytes % (4 * WIDTH) == 0
    chunk, cut = assemble(captured, {life.rid: rollout(life)}, 1, 0)
    assert chunk.num_missing == 1 and chunk.lost_bytes == captured.lost_bytes > 0
    assert 4 < len(cut[0].input_ids) < len(found[0].input_ids)
    assert torch.equal(cut[0].hidden, found[0].hidden[: len(cut[0].input_ids)])
    # taken: there is room again
    again = one_life(small, count=1)
    assert assemble(taken(small), {again.rid: rollout(again)}, 1, 0)[0].num_missing == 0


def test_states_that_are_not_finite_are_missing() -> None:
    capture = StateCapture(ROOMY, CPU)
    life = one_life(capture)
    captured = taken(capture)
    captured.states[2] = torch.nan
    chunk, found = assemble(captured, {life.rid: rollout(life)}, 1, 0)
    assert (chunk.num_missing, found) == (1, [])


def test_tensors_of_other_shapes_are_told_when_the_states_are_taken() -> None:
    """Never where they appear: an exception there would end the scheduler."""
    one, two = torch.ones(1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for wrong in (
        lambda c: c.prefill(["a"], [0], [3], 0, torch.ones(2, WIDTH), torch.ones(3), one),
        lambda c: c.prefill(["a"], [0], [2], 0, torch.ones(2, WIDTH), torch.ones(2), two),
        lambda c: c.decode(["a", "b"], 0, torch.ones(3, WIDTH), torch.ones(3), two, two),
        lambda c: c.decode(["a", "b"], 0, torch.ones(4, WIDTH), torch.ones(4), one, two),
    ):
        capture = StateCapture(ROOMY, CPU)
        wrong(capture)
        with pytest.raises(BatchError, match=r"hidden states cannot be kept: a .* came with tensors of"):
            taken(capture)
    capture = StateCapture(ROOMY, CPU)
    capture.prefill(["a"], [0], [2], 0, torch.ones(2, WIDTH), torch.ones(2), one)
    capture.prefill(["a"], [2], [2], 0, torch.ones(2, WIDTH + 1), torch.ones(2), one)
    with pytest.raises(BatchError, match="cannot be kept"):
        taken(capture)


def test_accepted_lengths_that_cannot_be_are_an_error() -> None:
    for length in (0, 3):
        capture = StateCapture(ROOMY, CPU)
        capture.decode(["a"], 0, torch.ones(2, WIDTH), torch.ones(2), torch.tensor([length]), torch.tensor([4]))
        with pytest.raises(BatchError, match=r"SGLang 0\.5\.17 accepted \[\d\] of 2 nodes at \[4\]"):
            taken(capture)


def test_bfloat16_stays_what_it_is() -> None:
    capture = StateCapture(ROOMY, CPU)
    rows = torch.arange(21.0).reshape(7, 3).bfloat16()
    capture.prefill(["a"], [0], [7], 2, rows, torch.arange(7), torch.tensor([7]))
    captured = taken(capture)
    assert captured.states.dtype == torch.bfloat16 and torch.equal(captured.states, rows)
    assert captured.behind.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_nothing_of_a_transfer_stays() -> None:
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))

    def left() -> set[Path]:
        return set(folder.glob("longtail-states-*"))

    before = left()
    capture = StateCapture(ROOMY, CPU)
    one_life(capture)
    captured = taken(capture)
    assert left() == before and captured.states.shape[0] > 0, "readable although its name is gone"
    with pytest.raises(BatchError), capture_file():
        raise BatchError("the scheduler wrote nothing")
    assert left() == before
