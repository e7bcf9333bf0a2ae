"""Where the answer stands in a response. Nothing found means None: a response without an answer earns nothing."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|[{}]|[A-Za-z]+|\d|[.;!?](?=\s)|.", re.DOTALL)
_SHORT_WORDS = frozenset(["an", "as", "at", "be", "by", "if", "in", "is", "it", "my", "of", "on", "so", "to", "we"])
# Names in mathematics of three letters and more; what stands behind a backslash is none of these.
_NAMES = frozenset(["and", "cos", "exp", "gcd", "lcm", "lim", "log", "max", "min", "mod", "sin", "sqrt", "tan"])


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


def without_words(answer: str) -> str:
    """An answer without the sentence around it: without the words before its first number or LaTeX command, and without
    what goes on behind it from the next word or end of a sentence on; as it is where it has neither. Words inside
    braces, names of functions and products of letters are mathematics."""
    depth, begun, start = 0, False, 0
    for piece in _PIECE.finditer(answer):
        at, text = piece.start(), piece[0]
        word = depth <= 0 and _is_word(text, answer[max(0, at - 1) : at])
        if begun and (word or (depth <= 0 and text in ".;!?")):
            return answer[start:at].lstrip(" \t,:").rstrip(" \t,:(-–—")
        start = piece.end() if word else start
        depth += (text == "{") - (text == "}")
        begun = begun or text[0] == "\\" or text.isdigit()
    return answer[start:].lstrip(" \t,:") if begun else answer


def _is_word(text: str, before: str) -> bool:
    """A word of prose, behind the character `before`; "2xy" is a product."""
    if not text.isalpha() or before.isalnum():
        return False
    word = text.lower()
    return word in _SHORT_WORDS or (len(word) > 2 and word not in _NAMES and bool(set(word) & set("aeiou")))


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
