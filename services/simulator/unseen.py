"""Tokens that a server's drafter has yet to see, of all running requests together, without a look at each.

Contexts grow with the server's progress, all alike. So two sums say it: requests that came after the last drafted round
lie behind by their whole context, all others by the progress since that round began.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Unseen:
    """Requests are numbered as they come; a `base` is a context less the progress."""

    newest_seen: int = 0
    since: float = 0.0
    new: int = 0
    new_base: float = 0.0

    def joined(self, base: float) -> None:
        self.new += 1
        self.new_base += base

    def left(self, number: int, base: float) -> None:
        if number > self.newest_seen:
            self.new -= 1
            self.new_base -= base

    def drafted(self, newest: int, began: float) -> None:
        """In a round that began at progress `began`, with every running request; `newest`: of these."""
        self.newest_seen, self.since, self.new, self.new_base = newest, began, 0, 0.0

    def tokens(self, running: int, progress: float) -> float:
        return self.new_base + self.new * progress + (running - self.new) * (progress - self.since)
