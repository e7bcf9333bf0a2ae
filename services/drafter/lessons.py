"""Responses on their way to a drafter that learns while it is served: first an exam, then a lesson.

Each arriving sequence waits in the *exam*, which nobody trains on; what leaves it goes into the training buffer. So a
candidate is judged on what came after everything that it learned from, which is what it will meet next, and an answer
to a prompt that came before cannot be on both sides by being drawn twice. An exam that was held is used up: judged on
it again and again, candidates would be chosen for it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from services.drafter.buffer import HiddenStateBuffer
from services.models.finite import all_finite
from services.models.hidden import HiddenStates

EXAM_SHARE = 0.25  # of the bytes


class Lessons:
    """At most `max_bytes` in all. The exam is full with `exam_tokens`. `credit`: tokens that training may still use
    before there is something new to learn; every token that is learned from earns `passes`."""

    def __init__(self, max_bytes: int, exam_tokens: int) -> None:
        self._exam_bytes = int(EXAM_SHARE * max_bytes)
        self._exam_tokens = exam_tokens
        self._exam: deque[HiddenStates] = deque()
        self._held = self._tokens = 0  # bytes and tokens of the exam
        self._buffer = HiddenStateBuffer(max_bytes - self._exam_bytes)
        self.credit = 0.0

    @property
    def num_bytes(self) -> int:
        return self._buffer.num_bytes + self._held

    def __len__(self) -> int:
        return len(self._buffer) + len(self._exam)

    @property
    def ready(self) -> bool:
        """Whether there are lessons to draw from."""
        return len(self._buffer) > 0

    @property
    def exam_full(self) -> bool:
        """Also with fewer tokens, when their bytes leave no room for more."""
        return self._tokens >= self._exam_tokens or self._held >= self._exam_bytes // 2

    def add(self, states: Iterable[HiddenStates], passes: float) -> None:
        """What teaches nothing is left out: no supervised token, numbers that are not finite, or larger than the exam's
        share."""
        for item in states:
            useful = bool(item.loss_mask[2:].any()) and all_finite(item.hidden)
            if item.num_bytes > self._exam_bytes or not useful:
                continue
            self._exam.append(item)
            self._count(item, 1)
            while self._held > self._exam_bytes or self._tokens - len(self._exam[0].input_ids) >= self._exam_tokens:
                self._learn_from_first(passes)

    def exam(self) -> list[HiddenStates]:
        return list(self._exam)

    def use_up_exam(self, passes: float) -> None:
        while self._exam:
            self._learn_from_first(passes)

    def draw(self, num_tokens: int, rng: random.Random) -> list[HiddenStates]:
        return self._buffer.sample(num_tokens, rng)

    def _learn_from_first(self, passes: float) -> None:
        item = self._exam.popleft()
        self._count(item, -1)
        if self._buffer.add([item]):
            self.credit += passes * len(item.input_ids)

    def _count(self, item: HiddenStates, sign: int) -> None:
        self._held += sign * item.num_bytes
        self._tokens += sign * len(item.input_ids)
