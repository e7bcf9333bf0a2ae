"""Commands to the workers of a team and their answers, between the threads of the actor that leads it.

Workers fetch: a command waits in a box until whoever serves that box takes it. It is done when every box that it was
put into has answered, and its result is what the first of them said.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

Result = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """`arguments`: a reference to the positional ones."""

    number: int
    method: str
    arguments: Any


@dataclass(slots=True)
class _Open:
    command: Command  # holds its arguments
    boxes: Sequence[str]
    future: Future[Result]
    results: dict[str, Result] = field(default_factory=dict)


class Mailbox:
    """A command that is refused, or lost with the workers, is an exception of its future."""

    def __init__(self, boxes: Sequence[str]) -> None:
        self._boxes: dict[str, queue.SimpleQueue[Command]] = {name: queue.SimpleQueue() for name in boxes}
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._posted = 0
        self._closed: Exception | None = None

    def post(self, boxes: Sequence[str], method: str, arguments: Any) -> Future[Result]:
        future: Future[Result] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future
            self._posted += 1
            command = Command(self._posted, method, arguments)
            self._open[command.number] = _Open(command, boxes, future)
            for box in boxes:
                self._boxes[box].put(command)
        return future

    def take(self, box: str, timeout_s: float) -> Command | None:
        """The next command in `box`; None when there was none in that time, and the worker asks again."""
        try:
            return self._boxes[box].get(timeout=timeout_s)
        except queue.Empty:
            return None

    def answer(self, box: str, number: int, result: Result) -> None:
        with self._lock:
            waiting = self._open.get(number)
            if waiting is None:
                return  # refused by another, or closed
            waiting.results[box] = result
            if len(waiting.results) == len(waiting.boxes):
                del self._open[number]
                waiting.future.set_result(waiting.results[waiting.boxes[0]])

    def refuse(self, number: int, error: Exception) -> None:
        with self._lock:
            waiting = self._open.pop(number, None)
        if waiting is not None:
            waiting.future.set_exception(error)

    def close(self, error: Exception) -> None:
        """Whatever is open, and comes later, fails with `error`. The first one counts: it is the cause of others."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
            lost, self._open = list(self._open.values()), {}
        for waiting in lost:
            try:
                waiting.future.set_exception(error)
            except InvalidStateError:  # its caller gave up
                continue
