"""What a model server that serves people tells about itself. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.types import ServedVersions


@dataclass(frozen=True, slots=True)
class LearningView:
    """Learning from what is served, counted since the server began. `published`: drafters that it found better and
    made a version of; `adopted`: versions of others that it took over; `exams`: comparisons that came to an end.
    `held_bytes`: hidden states kept now. `gain`: what the last exam said of the candidate, relative."""

    micro_steps: int = 0
    trained_tokens: int = 0
    exams: int = 0
    published: int = 0
    adopted: int = 0
    held_bytes: int = 0
    held_sequences: int = 0
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class ServerView:
    """Counts since the server began; `running` and `waiting` are answers now. Tokens and drafts are those of answers
    that came to their end. `versions` None: before the first weights."""

    server: str
    running: int
    waiting: int
    versions: ServedVersions
    swaps: int
    refused: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    verify_steps: int
    learning: LearningView | None = None
