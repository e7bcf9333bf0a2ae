"""Which CUDA graphs an engine captures: SGLang when its selector has several strategies to choose from, the native
one for all of them, as they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from services.config.section import Section
from services.config.speculation import StrategyConfig


class GraphsConfig(Section):
    """A strategy is captured, and so can be chosen, up to the batch size at which its nodes (running requests times
    num_draft_tokens) reach `max_nodes`; OFF at every batch size. This is a limit of memory, not of what pays: a round's
    logits take `max_nodes` times the vocabulary's size times 4 bytes. What pays is the selector's business: at 128
    requests of 8 nodes each a 7B shape was measured to decode twice as fast as without drafts.

    Up to `free_nodes` a round is bound by reading the weights (an H100's or H200's bf16 matrix products until some 300
    rows), so the rows that fill a batch up to the next captured size cost next to nothing, while every graph takes its
    memory: there neighbouring sizes differ by the factor `step` at most, where SGLang has such sizes. Beyond, every row
    costs its share, and all sizes are captured that SGLang would capture. Strategies that would bring all graphs beyond
    `memory_bytes` are left out, the deepest first; the deepest of all, with which SGLang starts, and OFF always stay.
    The native engine has batch sizes of its own, up to `free_nodes`, and runs without a graph what it has none for:
    beyond, launching kernels one by one is the smaller part.
    """

    max_nodes: int = Field(2048, ge=1)
    free_nodes: int = Field(384, ge=0)
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
