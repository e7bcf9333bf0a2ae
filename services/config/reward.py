"""The configuration section `reward`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.config.section import Section


class HttpConfig(Section):
    """A verifier behind HTTP: a POST with {prompt, answer, response, finished, task, meta} as JSON, answered by
    {"score": number, "correct": true or false (default: score >= 1)}. `token_env`: the environment variable of the
    reward workers that holds a bearer token."""

    url: str = Field(pattern=r"^https?://")
    token_env: str | None = None


class SandboxConfig(Section):
    """Limits of the process that runs code out of a response."""

    memory_bytes: int = Field(2**30, ge=2**26)
    file_bytes: int = Field(2**24, ge=2**16)  # that it may write in all, to memory
    python: str = "python3"  # on the system's PATH, or an absolute path; nobody must be able to read it


class RewardConfig(Section):
    """`verifier` "task" uses each prompt's own task scorer; "math" uses math-verify; "exact" compares text; "function"
    calls `function`, a dotted path `package.module.name`, with (prompt, rollout); "http" asks `http.url`; "code" runs
    the response's last fenced block followed by the prompt's answer (tests in Python that raise, or exit with another
    code than 0) in a sandbox. A verification that fails is no wrong answer: it is tried `retries` times more, counted,
    and a phase in which more than `max_error_fraction` of the rollouts failed ends the run with the cause."""

    verifier: Literal["task", "math", "exact", "function", "http", "code"] = "task"
    answer_marker: str = "#"  # the answer is what follows the last marker; "" takes the whole response
    function: str | None = Field(None, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
    http: HttpConfig | None = None
    sandbox: SandboxConfig = SandboxConfig()
    workers: int = Field(1, ge=1)
    timeout_s: float = Field(5.0, gt=0)
    retries: int = Field(1, ge=0)
    max_error_fraction: float = Field(0.5, ge=0, le=1)

    @model_validator(mode="after")
    def _complete(self) -> RewardConfig:
        if self.verifier == "function" and self.function is None:
            raise ValueError("verifier 'function' needs reward.function, as in my_package.rewards.score")
        if self.verifier == "http" and self.http is None:
            raise ValueError("verifier 'http' needs reward.http.url")
        return self
