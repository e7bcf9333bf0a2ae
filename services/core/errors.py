"""One tree of typed errors for what users and the wire can get wrong.

Every message says what happened and what to do about it. Programmer invariants use `assert`, not these.
"""

from __future__ import annotations


class LongtailError(Exception):
    """Base of everything a user may see; `exit_code` is what the command line returns for it."""

    exit_code = 1


class ConfigError(LongtailError):
    """The configuration cannot be run: unknown key, wrong value, impossible combination."""

    exit_code = 2


class DataError(LongtailError):
    """A prompt set or model file is unusable; the message names file, line and reason."""

    exit_code = 2


class RequestError(LongtailError):
    """A rollout request the engine cannot serve (too long, bad sampling parameters); nothing was started."""


class OverloadedError(LongtailError):
    """A server has as much work waiting as it takes; nothing was started. Try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[OverloadedError], tuple[str, int]]:
        return type(self), (str(self), self.retry_after_s)


class WeightError(LongtailError):
    """A weight load was refused (nothing matched, wrong shape, not finite); the receiver keeps what it had."""


class TransferError(LongtailError):
    """Weights did not come over a direct connection (peer lost, time-out, superseded). What had not arrived was not
    loaded; a receiver says by its versions what it has, and the same weights can be had another way."""


class GpuMemoryError(LongtailError):
    """A training step did not fit its GPU; the message names the settings that make it smaller."""


class BatchError(LongtailError):
    """A trainer was handed rollouts, rewards or hidden states it must not learn from (misaligned, NaN, wrong size)."""


class StaleEpochError(LongtailError):
    """A message carried an epoch that is no longer the slot's; the sender must refresh its lease."""


class ServiceLostError(LongtailError):
    """A remote service died or became unreachable; `name` says which. `permanent`: it will not be restarted."""

    def __init__(self, name: str, reason: str, permanent: bool = False) -> None:
        super().__init__(f"{name} is lost: {reason}")
        self.name = name
        self.reason = reason
        self.permanent = permanent

    def __reduce__(self) -> tuple[type[ServiceLostError], tuple[str, str, bool]]:
        return type(self), (self.name, self.reason, self.permanent)


class BlobLostError(LongtailError):
    """Tensors that a call was given are gone with the machine that held them; whoever was called is well."""


class WaitTimeoutError(LongtailError):
    """A wait ran out; the message says what was waited for and for how long."""


class ControlMessageError(LongtailError):
    """A control message carried tensor data; tensors travel by reference only."""


class ControlRefusedError(LongtailError):
    """A run was asked for something that it cannot do now; the message says what and why. Nothing was changed."""


class UnknownRunError(LongtailError):
    """There is no run of that id."""


class MeterError(LongtailError):
    """The energy of a GPU cannot be measured; the message says which one and why."""


class RewardError(LongtailError):
    """Too many verifications failed to learn from the rest; the message names the most common cause."""


class NothingTrainedError(LongtailError):
    """A run came to its end and left the policy as it was: whoever started it must not take that for success."""

    exit_code = 3


class StopRequested(LongtailError):
    """The user asked the run to stop (Ctrl-C); raised at the next safe point so that the run folder stays valid."""

    exit_code = 130
