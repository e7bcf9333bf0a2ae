"""Where the answer stands in a response. Nothing found means None: a response without an answer earns nothing."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def final_answer(text: str, marker: str, finished: bool) -> str | None:
    """What follows the *last* `marker`, stripped; with marker "" the whole response, if it was `finished`.

    A response that was cut off has no end, so without a marker nothing in it can be called its answer. Text inside an
    unclosed <think> is a draft, not an answer.
    """
    visible = after_thinking(text)
    if visible is None:
        return None
    if marker:
        _, found, visible = visible.rpartition(marker)
        if not found:
            return None
    elif not finished:
        return None
    return visible.strip() or None


def after_thinking(text: str) -> str | None:
    """The part after the last </think>; None when a <think> is still open."""
    visible = text.rpartition("</think>")[2]
    return None if "<think>" in visible else visible


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}, braces balanced; None when there is none, or it is empty or was cut off.

    Escaped braces (\{) do not count towards the balance.
    """
    start = max((match.end() for match in _BOXED.finditer(text)), default=None)
    end = None if start is None else _closing_brace(text, start)
    return None if end is None else text[start:end].strip() or None


def _closing_brace(text: str, start: int) -> int | None:
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1  # whatever is escaped is no brace
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at
        at += 1
    return None
