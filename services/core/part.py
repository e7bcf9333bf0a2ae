"""A part of a call's answer, where calls are not Ray's: what `num_returns` gives there."""

from __future__ import annotations

from typing import Any, Protocol


class _Call(Protocol):
    what: str
    done: bool
    answered_s: float | None

    def result(self, timeout_s: float) -> Any: ...


class Part:
    """One of several results of a call; also what a `Blob` is where tensors stay in this process."""

    def __init__(self, call: _Call, index: int) -> None:
        self.call, self._index = call, index
        self.what = call.what

    @property
    def done(self) -> bool:
        return self.call.done

    @property
    def answered_s(self) -> float | None:
        return self.call.answered_s

    def result(self, timeout_s: float) -> Any:
        return self.call.result(timeout_s)[self._index]
