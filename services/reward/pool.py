"""A pool of processes in which a verification that hangs or crashes costs one worker and one rollout, never a run.

Rollouts travel in batches to keep the overhead low. When a batch runs out of time or its process dies, its members
are tried again one by one, so that only the guilty one is charged.
"""

from __future__ import annotations

import concurrent.futures as cf
import math
import multiprocessing
import time
from collections.abc import Collection, Sequence
from concurrent.futures.process import BrokenProcessPool

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from services.core.errors import ServiceLostError, WaitTimeoutError
from services.core.protocols import Clock
from services.core.texts import prompt_text, rollout_text
from services.core.types import Reward
from services.reward.worker import Pair, VerifierSpec, score_batch, start

BATCH = 16
START_S = 120.0  # importing reasoning-gym or sympy on a busy machine
REPLACE_S = 30.0  # killing a worker and starting the next
LOOK_S = 1.0  # how often a wait looks whether the pool still lives

Batch = tuple[int, ...]
Future = ProcessFuture[list[Reward]]


class RewardPool:
    """`workers` processes with one verifier each; `timeout_s` is what one verification may take.

    Spawned, not forked: a fork of a process that runs torch and Ray threads can hang, and would carry their memory.
    """

    def __init__(self, spec: VerifierSpec, workers: int, timeout_s: float, clock: Clock = time.monotonic) -> None:
        self._spec, self._workers, self._timeout_s, self._clock = spec, workers, timeout_s, clock
        self._closed = False
        self._pool = self._started_pool()

    def score(self, pairs: Sequence[Pair]) -> list[Reward]:
        """One reward per pair, in order.

        Raises ServiceLostError when workers cannot start, WaitTimeoutError when the pool makes no progress.
        """
        assert not self._closed
        light = [(prompt_text(prompt), rollout_text(rollout)) for prompt, rollout in pairs]
        try:
            return self._score(light)
        except BrokenProcessPool:  # pebble gives up when a worker is killed from outside while idle: start again, once
            self._stop()
            self._pool = self._started_pool()
        try:
            return self._score(light)
        except BrokenProcessPool as error:
            raise ServiceLostError("reward pool", f"its workers cannot start ({error}); see their log") from error

    def close(self) -> None:
        """Ends every worker, busy or not."""
        self._closed = True
        self._stop()

    def _started_pool(self) -> ProcessPool:
        """Workers start with the first task, so give them one: they import while other services start."""
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(max_workers=self._workers, initializer=start, initargs=(self._spec,), context=context)
        pool.schedule(score_batch, args=((), self._timeout_s), timeout=self._timeout_s)
        return pool

    def _stop(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _score(self, pairs: list[Pair]) -> list[Reward]:
        rewards: dict[int, Reward] = {}
        failed = self._run(pairs, _batches(len(pairs), self._workers), rewards)
        charged: dict[Batch, str] = {batch: why for batch, why in failed.items() if len(batch) == 1}
        alone: list[Batch] = [(index,) for batch in failed if len(batch) > 1 for index in batch]
        charged |= self._run(pairs, alone, rewards)
        for (index,), why in charged.items():
            rewards[index] = Reward(value=0.0, correct=False, error=why)
        return [rewards[index] for index in range(len(pairs))]

    def _run(self, pairs: list[Pair], batches: list[Batch], rewards: dict[int, Reward]) -> dict[Batch, str]:
        """Scores `batches` into `rewards`; returns those that failed as a whole, with the reason."""
        futures = {self._schedule([pairs[i] for i in batch]): batch for batch in batches}
        self._wait(futures)
        failed: dict[Batch, str] = {}
        for future, batch in futures.items():
            outcome = self._outcome(future)
            if isinstance(outcome, str):
                failed[batch] = outcome
            else:
                rewards.update(zip(batch, outcome, strict=True))
        return failed

    def _schedule(self, pairs: list[Pair]) -> Future:
        self._check_alive()
        return self._pool.schedule(score_batch, args=(pairs, self._timeout_s), timeout=self._timeout_s)

    def _check_alive(self) -> None:
        if not self._pool.active:
            raise BrokenProcessPool("the pool has stopped")

    def _wait(self, futures: Collection[cf.Future[list[Reward]]]) -> None:
        """Bounded even if no worker ever starts; the bound is what all of them timing out would take."""
        bound = START_S + math.ceil(len(futures) / self._workers) * (self._timeout_s + REPLACE_S)
        deadline = self._clock() + bound
        while pending := cf.wait(futures, timeout=LOOK_S).not_done:
            self._check_alive()
            if self._clock() > deadline:
                for future in pending:
                    future.cancel()
                raise WaitTimeoutError(
                    f"waited {bound:.0f} s for {len(pending)} of {len(futures)} reward tasks: "
                    "the reward workers make no progress, look at their log for the cause"
                )

    def _outcome(self, future: Future) -> list[Reward] | str:
        """The rewards, or what befell the process."""
        try:
            return list(future.result(timeout=0))
        except cf.TimeoutError:
            return f"the verifier took longer than reward.timeout_s = {self._timeout_s:g} s and was killed"
        except ProcessExpired as error:
            return f"the verifier's process died (exit code {error.exitcode})"


def _batches(count: int, workers: int) -> list[Batch]:
    """Contiguous batches, small enough that every worker gets some."""
    size = max(1, min(BATCH, math.ceil(count / workers)))
    return [tuple(range(at, min(at + size, count))) for at in range(0, count, size)]
