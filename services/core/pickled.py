"""Records that are pickled as a call of their class.

A frozen dataclass with slots is otherwise taken apart and put together field by field through `dataclasses.fields`,
which takes two thirds of pickling a server's report and half of unpickling it.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def pickled_by_call(kind: type[T]) -> type[T]:
    """For a dataclass of several fields, all of which its constructor takes; what that checks is checked again."""
    named = fields(kind)  # type: ignore[arg-type]
    assert len(named) > 1 and all(f.init and not f.kw_only for f in named), kind
    values = attrgetter(*[f.name for f in named])

    def reduced(self: T) -> tuple[type[T], tuple[Any, ...]]:
        return kind, values(self)

    kind.__reduce__ = reduced  # type: ignore[assignment, method-assign]
    return kind
