"""Learning from what is served, in the idle moments of the server that serves it: one micro-step at a time.

    responses ── exam ──> lessons ── micro-steps ──> candidate ── judged on the exam ──> new version ──> all servers

A version is made by putting it on a shelf (a folder that all servers see) under the next number; who is second with a
number takes over what is there and goes on from it. So every server learns from its own responses, and no two drafters
ever have one name. Files are written and read beside the engine's thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from torch import Tensor

from services.core.errors import DataError, WeightError
from services.core.protocols import Clock
from services.core.serving import LearningView
from services.drafter.exam import Piece, judge
from services.drafter.head import target_head
from services.drafter.lessons import Lessons
from services.drafter.shelf import Shelf
from services.drafter.state import DrafterState, fresh_state
from services.drafter.trainer import DrafterTrainer
from services.models.drafter import Drafter
from services.models.hidden import HiddenStates
from services.weights.learning import NewDrafter, Spare

EXAM_PACKS, PARTS_PER_PACK = 4, 4  # an exam's tokens in packs of a micro-step; it is held part by part
ROUND_STEPS = 16  # micro-steps between two exams, at least
PASSES = 16.0  # over every token, before it takes new ones to go on
LOOK_S = 2.0  # between two looks for what other servers found
LOG = logging.getLogger("longtail.learning")
MakeShelf = Callable[[int, Mapping[str, Tensor]], Shelf]  # of a policy


@dataclass
class _Exam:
    """`left`: parts that are still to be asked about, in each call one."""

    candidate: DrafterState
    drafters: tuple[Drafter, Drafter]  # served, candidate
    left: list[list[HiddenStates]]
    pieces: list[Piece] = field(default_factory=list)


class OnlineLearner:
    """The `Learner` of one server. `files` runs what touches files, one after the other."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        make_shelf: MakeShelf,
        seed: int,
        clock: Clock,
        files: Executor,
        passes: float = PASSES,
    ) -> None:
        self._trainer, self._make_shelf, self._seed, self._clock = trainer, make_shelf, seed, clock
        self._config = trainer.config
        self._files, self._all_passes = files, passes
        self._served: NewDrafter | None = None
        self._shelf: Shelf | None = None
        self._lessons = self._new_lessons()
        self._exam: _Exam | None = None
        self._steps = 0  # micro-steps since the last exam
        self._vain = 0  # exams in a row that found nothing better
        self._coming: Future[NewDrafter | None] | None = None  # what a look or a publication comes to
        self._looked_s = clock()
        self._ours: NewDrafter | None = None  # being put on the shelf
        self._told = ""  # the last trouble with files
        self._view = LearningView()

    # -- the engine's side

    def begin(self, policy_version: int, policy: Mapping[str, Tensor], drafter: NewDrafter) -> None:
        trainer = self._trainer
        trainer.load_head(target_head(policy, trainer.spec, policy_version, trainer.device))
        self._shelf = self._make_shelf(policy_version, policy)
        self._lessons, self._coming, self._vain = self._new_lessons(), None, 0
        self._go_on_from(drafter)

    def add(self, states: Sequence[HiddenStates]) -> None:
        self._lessons.add(states, self._passes)

    def work(self) -> Spare:
        if self._served is None:
            return Spare(more=False)
        found = self._arrived()
        if found is not None:
            return Spare(more=True, found=found)
        if self._exam is not None:
            self._ask_next(self._exam)
        elif self._due:
            self._begin_exam()
        elif self._lessons.ready and self._lessons.credit > 0:
            self._train()
        else:
            return Spare(more=False)
        return Spare(more=True)

    def view(self) -> LearningView:
        return replace(self._view, held_bytes=self._lessons.num_bytes, held_sequences=len(self._lessons))

    def close(self) -> None:
        self._files.shutdown(wait=True, cancel_futures=True)

    # -- lessons

    def _new_lessons(self) -> Lessons:
        config = self._config
        return Lessons(config.buffer_bytes, EXAM_PACKS * config.pack_tokens)

    @property
    def _passes(self) -> float:
        """Fewer once training brings nothing any more: it then only asks now and then whether that has changed."""
        rests = self._vain >= self._config.training.patience
        return self._all_passes / self._config.training.probe_every if rests else self._all_passes

    def _train(self) -> None:
        rng = random.Random(f"drafter {self._seed} {self._trainer.total_steps}")
        done = self._trainer.train_micro_step(self._lessons.draw(self._config.pack_tokens, rng))
        self._lessons.credit -= max(1, done.num_tokens)
        self._steps += 1
        self._view = replace(
            self._view,
            micro_steps=self._view.micro_steps + 1,
            trained_tokens=self._view.trained_tokens + done.num_tokens,
        )

    # -- exams

    @property
    def _due(self) -> bool:
        return self._steps >= ROUND_STEPS and self._lessons.exam_full and self._coming is None

    def _begin_exam(self) -> None:
        assert self._served is not None
        candidate, trainer = self._trainer.state(), self._trainer
        drafters = trainer.loaded(self._served.tensors), trainer.loaded(candidate["tensors"])
        self._exam = _Exam(
            candidate, drafters, parts_of(self._lessons.exam(), self._config.pack_tokens // PARTS_PER_PACK)
        )

    def _ask_next(self, exam: _Exam) -> None:
        part = exam.left.pop()
        old, new = (self._trainer.acceptance("", drafter, part) for drafter in exam.drafters)
        starts = old.num_tokens
        exam.pieces.append(Piece(starts, starts * old.acceptance_length, starts * new.acceptance_length))
        if not exam.left:
            self._end_exam(exam)

    def _end_exam(self, exam: _Exam) -> None:
        verdict = judge(exam.pieces, self._config.training.min_gain)
        self._exam, self._steps = None, 0
        self._vain = 0 if verdict.decision == "better" else self._vain + 1
        self._lessons.use_up_exam(self._passes)
        self._view = replace(self._view, exams=self._view.exams + 1, gain=verdict.gain)
        assert self._served is not None
        if verdict.decision == "better":
            LOG.info("a better drafter: acceptance length %+.1f%% on new answers", 100 * verdict.gain)
            self._publish(NewDrafter(self._served.version + 1, exam.candidate["tensors"]), exam.candidate)
        elif verdict.decision == "worse":
            LOG.info("what was learned is worse (%+.1f%%): beginning again from what is served", 100 * verdict.gain)
            self._trainer.load_state(fresh_state(self._served.tensors, self._trainer.method))

    # -- versions

    def _publish(self, drafter: NewDrafter, state: DrafterState) -> None:
        shelf = self._shelf
        assert shelf is not None

        def put() -> NewDrafter | None:
            return drafter if shelf.put(drafter, state["total_steps"]) else shelf.newer(drafter.version - 1)

        self._coming = self._files.submit(put)
        self._ours = drafter

    def _look(self) -> None:
        shelf, served = self._shelf, self._served
        assert shelf is not None and served is not None
        self._looked_s = self._clock()
        self._coming = self._files.submit(shelf.newer, served.version)

    def _arrived(self) -> NewDrafter | None:
        """What a file operation came to, once it has; now and then another look is begun."""
        if self._coming is None:
            if self._exam is None and self._clock() - self._looked_s >= LOOK_S:
                self._look()
            return None
        if not self._coming.done():
            return None
        coming, self._coming = self._coming, None
        try:
            found = coming.result()
        except (OSError, DataError, WeightError) as error:
            if str(error) != self._told:
                LOG.error("the folder of better drafters failed, what is served stays: %s", error)
            self._told = str(error)
            return None
        if found is None:
            return None
        if found is self._ours:
            self._served = found
            self._view = replace(self._view, published=self._view.published + 1)
        else:
            self._go_on_from(found)
            self._view = replace(self._view, adopted=self._view.adopted + 1)
        return found

    def _go_on_from(self, drafter: NewDrafter) -> None:
        self._trainer.load_state(fresh_state(drafter.tensors, self._trainer.method))
        self._served, self._exam, self._steps = drafter, None, 0


def parts_of(states: Sequence[HiddenStates], tokens: int) -> list[list[HiddenStates]]:
    """In order, each of at most `tokens` tokens, or of one sequence."""
    parts: list[list[HiddenStates]] = []
    room = 0
    for item in states:
        length = len(item.input_ids)
        if not parts or length > room:
            parts.append([])
            room = tokens
        parts[-1].append(item)
        room -= length
    return parts
