"""`longtail submit`: a run as a Ray job on a cluster, followed to its end.

A run is known by its id. To submit it again is safe: a running job is followed rather than started twice, a finished
run is left alone, and one whose machine was lost goes on from its last checkpoint.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from ray.job_submission import JobSubmissionClient
from rich.console import Console

from deploy.jobs import Follower, Outcome, attempts, connect, is_over, new_id
from deploy.upload import make_upload
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError, LongtailError, StopRequested
from services.report.run_folder import make_run_id

# Submissions after the head was lost; a job that ends by itself is never submitted again.
MOST_AGAIN = 3
LOST_S = 600.0


@dataclass(frozen=True, slots=True)
class Submission:
    """`arguments`: of `longtail train`. `env` wins over the environment of the cluster's nodes; what a run sets for
    each of its actors (numbers of threads, GPUs) wins over both."""

    arguments: Sequence[str]
    working_dir: Path
    address: str | None = None
    run_id: str | None = None
    env: Mapping[str, str] | None = None
    exclude: Sequence[str] = ()
    wait: bool = True


class JobFailedError(LongtailError):
    """The job ended by itself without success; the command returns its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def submit(config: ClusterConfig, wanted: Submission) -> None:
    """Raises JobFailedError with the job's exit code."""
    if not config.run.dir.is_absolute():
        raise ConfigError(
            f"run.dir {config.run.dir} would lie in the job's temporary folder on the cluster: set it to an absolute "
            "path on a disk that outlives the job"
        )
    run_id = wanted.run_id or config.run.id or make_run_id(config.run.name, datetime.now(UTC), token_hex(3))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    client = connect(wanted.address)
    try:
        _submit(client, wanted, run_id, console)
    except KeyboardInterrupt:
        last = attempts(client, run_id)
        words = f"; it goes on, end it with: ray job stop {last[-1].submission_id}" if last else ""
        raise StopRequested(f"no longer following run {run_id}{words}") from None


def _submit(client: JobSubmissionClient, wanted: Submission, run_id: str, console: Console) -> None:
    earlier = attempts(client, run_id)
    if earlier and not is_over(earlier[-1].status):
        job_id = str(earlier[-1].submission_id)
        console.print(f"run {run_id} is under way already, as job {job_id}")
    else:
        job_id = _start(client, wanted, run_id, console)
    if not wanted.wait:
        return
    follower = Follower(client, console.print, LOST_S)
    for again in range(MOST_AGAIN + 1):
        ended = follower.follow(job_id)
        if not lost_with_the_head(ended, follower.was_lost) or again == MOST_AGAIN:
            break
        console.print(f"the job went with the cluster's head: run {run_id} is submitted again")
        follower.was_lost = False
        job_id = _start(client, wanted, run_id, console)
    _judge(ended, job_id)


def lost_with_the_head(ended: Outcome | None, was_lost: bool) -> bool:
    """A job that the head does not know any more, or that ended without an exit code of its own after the head was
    away. Anything else ended by itself: to run it again would repeat its mistake (pitfall 70)."""
    if ended is None:
        return True
    return was_lost and ended.status == "FAILED" and ended.exit_code is None


def _start(client: JobSubmissionClient, wanted: Submission, run_id: str, console: Console) -> str:
    entrypoint = entry_of(wanted, run_id)
    with tempfile.TemporaryDirectory() as folder:
        upload = make_upload(wanted.working_dir, Path(folder) / "longtail.zip", wanted.exclude)
        console.print(f"uploading {upload} of {wanted.working_dir.resolve()}")
        job_id: str = client.submit_job(
            entrypoint=entrypoint,
            submission_id=new_id(client, run_id),
            runtime_env={"working_dir": str(upload.archive), "env_vars": dict(wanted.env or {})},
            metadata={"run_id": run_id},
        )
    console.print(f"run {run_id} is job {job_id}: {entrypoint}")
    return job_id


def entry_of(wanted: Submission, run_id: str) -> str:
    """A checkout that is sent is what runs, whatever is installed there."""
    sent = (wanted.working_dir / "deploy" / "__main__.py").is_file()
    program = ["python", "-m", "deploy"] if sent else ["longtail"]
    address = [] if any(a.startswith("placement.address=") for a in wanted.arguments) else ["placement.address=auto"]
    return shlex.join([*program, "train", *wanted.arguments, *address, f"run.id={run_id}", "--quiet"])


def _judge(ended: Outcome | None, job_id: str) -> None:
    if ended is None:
        raise JobFailedError(f"the cluster does not know job {job_id} any more", 1)
    if ended.status == "STOPPED":
        raise JobFailedError(f"job {job_id} was stopped", StopRequested.exit_code)
    if ended.status != "SUCCEEDED":
        first = ended.message.strip().splitlines()[:1]
        raise JobFailedError(f"job {job_id} failed: {''.join(first)}", ended.exit_code or 1)
