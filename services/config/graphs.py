"""Which CUDA graphs an engine captures: SGLang when its selector has several strategies to choose from, the native
one for all of them, as they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from services.config.section import Section
from services.config.speculation import StrategyConfig


class GraphsConfig(Section):
    """A strategy is captured, and so can be chosen, up to the batch size at which its nodes (running requests times
    num_draft_tokens) reach `max_nodes`; OFF at every batch size. Beyond some 300 nodes an H100's bf16 matrix products
    are bound by arithmetic and not by reading the weights: every further node then costs its full share, and only a
    drafter that is nearly always right could pay for it. Neighbouring batch sizes differ by the factor `step` at most,
    where SGLang has such sizes (1: all that it would capture): below that limit the rows that fill a batch up to the
    next size cost next to nothing, while every graph takes its memory. Strategies that would bring all graphs beyond
    `memory_bytes` are left out, the deepest first; the deepest of all, with which SGLang starts, and OFF always stay.
    The native engine has its own batch sizes, and runs without a graph what it has none for.
    """

    max_nodes: int = Field(384, ge=1)
    step: float = Field(1.5, ge=1)
    memory_bytes: int = Field(8 * 2**30, ge=2**20)


def switching_problems(strategies: Sequence[StrategyConfig]) -> Iterator[str]:
    """Why one SGLang engine cannot switch between these. Its depths share one drafter, one topk (fixed when SGLang
    starts: it sizes what a round hands to the next one) and one rule of acceptance."""
    drafting = [s for s in strategies if s.drafter != "off"]
    if any(s.drafter != "eagle" or s.topk != 1 for s in drafting):
        yield (
            "an SGLang engine switches between EAGLE chains of several depths and OFF: give the selector strategies "
            "with drafter: eagle and topk: 1 only, or one strategy with speculation.selector.type: fixed"
        )
    if len({s.sampled for s in drafting}) > 1:
        yield "an SGLang engine samples the drafts of all its strategies or of none: set sampled alike in all of them"
