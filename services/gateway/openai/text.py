"""From token ids to text that may be sent: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.rollout.stops import find_stop


class TextCodec(Protocol):
    """The model's tokenizer."""

    def encode_prompt(self, text: str) -> list[int]:
        """With whatever the model wants before a text."""

    def render_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """By the chat template. Raises DataError without one, and RequestError for messages that it refuses."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def settled(self, ids: Sequence[int]) -> str:
        """The part of `decode(ids)` that no further token can change."""

    def token_bytes(self, token_id: int) -> bytes: ...


class TextStream:
    """The text of one choice while its tokens come. What was sent is always the beginning of the final text, which is
    that of all ids at once (a character may be spread over tokens) cut before a stop string. So the end of what is
    settled is held back as long as it may be the beginning of a stop string."""

    def __init__(self, codec: TextCodec, stop_strings: Sequence[str]) -> None:
        self._codec, self._stops = codec, tuple(stop_strings)
        self._ids: list[int] = []
        self._sent = ""

    @property
    def ids(self) -> Sequence[int]:
        return self._ids

    def push(self, ids: Sequence[int]) -> str:
        """What may be sent now."""
        self._ids.extend(ids)
        settled = self._codec.settled(self._ids)
        return self._send(settled[: len(settled) - _held_back(settled, self._stops)])

    def finish(self) -> str:
        """The rest."""
        return self._send(self.final())

    def final(self) -> str:
        text = self._codec.decode(self._ids)
        start = find_stop(text, self._stops)
        return text if start is None else text[:start]

    def _send(self, text: str) -> str:
        assert text.startswith(self._sent), f"{self._sent!r} was sent already, and now the text is {text!r}"
        new, self._sent = text[len(self._sent) :], text
        return new


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that a stop string may begin with; all from a whole stop string on."""
    found = find_stop(text, stops)
    if found is not None:
        return len(text) - found
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
