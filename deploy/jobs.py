"""Ray jobs of one run: the first submission, later ones under the same run id, and what became of them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

import aiohttp
import requests
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from services.core.errors import ConfigError, WaitTimeoutError

T = TypeVar("T")

AGAIN = "-again-"
POLL_S = 1.0
# Ray's client waits for ever on a dashboard that took a request and died, or is only half up.
ANSWER_S = 30.0
UNREACHABLE = (
    TimeoutError,
    ConnectionError,
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    aiohttp.ClientError,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`exit_code` of the job's own process; None when it has none: it was stopped, or went with its machine."""

    status: str
    exit_code: int | None
    message: str


def connect(address: str | None) -> JobSubmissionClient:
    """Raises ConfigError when nobody answers, or refuses us."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    where = address or os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265"
    try:
        return JobSubmissionClient(where)
    except UNREACHABLE:
        raise ConfigError(f"no Ray dashboard answers at {where}: name it with --address http://HOST:8265") from None
    except RuntimeError as error:
        refused = any(word in str(error).lower() for word in ("401", "403", "unauthenticated", "token"))
        remedy = "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token" if refused else "see its log"
        raise ConfigError(f"{where} refuses jobs: {str(error).strip().splitlines()[-1]}; {remedy}") from None


def attempts(client: JobSubmissionClient, run_id: str) -> list[JobDetails]:
    """Jobs of this run, oldest first: RUN_ID, RUN_ID-again-2, ..."""
    found = [job for job in client.list_jobs() if _number(job, run_id)]
    return sorted(found, key=lambda job: _number(job, run_id))


def _number(job: JobDetails, run_id: str) -> int:
    """0 for a job of another run."""
    match = re.fullmatch(re.escape(run_id) + rf"(?:{AGAIN}(\d+))?", job.submission_id or "")
    return int(match[1] or 1) if match else 0


def new_id(client: JobSubmissionClient, run_id: str) -> str:
    """Ray refuses an id that it has seen, also after a lost answer: each attempt has its own (pitfall 70)."""
    earlier = attempts(client, run_id)
    return f"{run_id}{AGAIN}{_number(earlier[-1], run_id) + 1}" if earlier else run_id


def is_over(status: JobStatus) -> bool:
    return status.is_terminal()


def outcome(job: JobDetails) -> Outcome:
    return Outcome(job.status.value, job.driver_exit_code, job.message or "")


def bounded(ask: Callable[[], T], timeout_s: float) -> T:
    """The answer, or TimeoutError; a call that never ends keeps its thread, which does not keep the process."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except (*UNREACHABLE, RuntimeError) as error:  # all that the client raises; a bug shows as a traceback
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()
    return answer.result(timeout_s)


class Follower:
    """Prints a job's log as it grows, through lost connections. `lost_s`: seconds without an answer until it gives
    up; `was_lost`: there was no answer at least once."""

    def __init__(self, client: JobSubmissionClient, say: Callable[[str], None], lost_s: float) -> None:
        self._client, self._say, self._lost_s = client, say, lost_s
        self._printed = 0
        self.was_lost = False

    def follow(self, job_id: str) -> Outcome | None:
        """To the job's end; None when the cluster that came back does not know it. Raises WaitTimeoutError."""
        self._printed, silent_since = 0, None
        while True:
            try:
                job = self._look(job_id)
                silent_since = None
                if job is None or is_over(job.status):
                    return None if job is None else outcome(job)
            except UNREACHABLE as error:
                now = time.monotonic()
                silent_since = silent_since or now
                if not self.was_lost or now == silent_since:
                    self._say(f"lost the connection to the cluster ({type(error).__name__}); trying again")
                self.was_lost = True
                if now - silent_since > self._lost_s:
                    raise WaitTimeoutError(
                        f"the cluster did not answer for {self._lost_s:.0f} s; when it is back, submit again with the "
                        "same --run-id"
                    ) from None
            time.sleep(POLL_S)

    def _look(self, job_id: str) -> JobDetails | None:
        """State first, log second: what is printed after the last state is complete."""
        try:
            job = bounded(lambda: self._client.get_job_info(job_id), ANSWER_S)
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise
        try:
            log = bounded(lambda: self._client.get_job_logs(job_id), ANSWER_S)
        except RuntimeError:  # there is no log yet, or it went with its machine
            log = ""
        if len(log) > self._printed:
            self._say(log[self._printed :].rstrip("\n"))
            self._printed = len(log)
        return job
