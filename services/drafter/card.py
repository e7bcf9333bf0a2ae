"""The model card of an exported drafter: what it is for, what it learned from, how it was measured, how to start it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.drafter.layouts import Layout
from services.models.drafter import DrafterMethod


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """`rates`: acceptance by position, given that those before were accepted. `how`: "engine", counted while it
    generated, or "offline", estimated from its responses."""

    temperature: float
    rates: tuple[float, ...]
    acceptance_length: float
    how: str


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """Tokens per second over those without drafts, at `running` requests. `predicted`: of the best depth (0: no drafts)
    by the costs; `timed`: of a chain of `timed_depth` (None: not timed)."""

    running: int
    depth: int
    predicted: float
    timed_depth: int = 0
    timed: float | None = None


@dataclass(frozen=True)
class Measured:
    """`prompts`: held-out ones that were answered. `machine`: where the times are from; `costs`: the prediction's."""

    prompts: int
    acceptance: tuple[AcceptanceRow, ...]
    speed: tuple[SpeedRow, ...]
    machine: str
    costs: str


@dataclass(frozen=True)
class Origin:
    """Of a drafter that a run made. `base`: the model that the run began with; `policy_version`: of the policy beside
    it, None where the run kept no checkpoint to tell; `data`: fingerprint of the training prompts in their order."""

    run: str
    base: str
    policy_version: int | None
    drafter_version: int | None
    data: str | None
    total_steps: int
    licence: str | None = None


_CARD = """{head}# {title} drafter

Drafts tokens for speculative decoding of one target ({model_type}, hidden size {hidden_size}, {vocab_size} tokens). One
decoder layer over the embedding of the next token and {reads}. The embedding{shared} \
the target's and not in this folder: the drafter is of use only beside the target it was trained for.

- tensors: {count} trained, {parameters} parameters, `model.safetensors`
- architecture: {architecture}
- trained by Longtail for {total_steps} micro-steps
"""
_ENGINE = {"eagle": ("EAGLE", "eagle"), "eagle3": ("EAGLE3", "eagle3")}


def drafter_card(
    method: DrafterMethod,
    parameters: int,
    total_steps: int,
    architecture: str,
    layout: Layout = "sglang",
    origin: Origin | None = None,
    measured: Measured | None = None,
) -> str:
    """README.md; without `origin` the short card of a folder that a warm-up or a run writes."""
    own = method.draft_ids
    text = _CARD.format(
        head="" if origin is None else _front_matter(origin),
        title=method.title,
        model_type=method.target.model_type,
        hidden_size=method.target.hidden_size,
        vocab_size=method.target.vocab_size,
        reads=method.reads,
        shared=" and LM head\nare" if own is None else f" is (the LM head,\nover {len(own)} tokens, its own)",
        count=len(method.names()),
        parameters=parameters,
        architecture=architecture,
        total_steps=total_steps,
    )
    if origin is None:
        return text
    return "\n".join([text.rstrip("\n"), *_origin(origin), *_figures(measured), *_start(method, layout), ""])


def _front_matter(origin: Origin) -> str:
    licence = [] if origin.licence is None else [f"license: {origin.licence}"]
    return "\n".join(["---", *licence, "tags:", "- speculative-decoding", "- longtail", "---", "", ""])


def _origin(origin: Origin) -> Iterator[str]:
    policy = "of the run's end" if origin.policy_version is None else f"version {origin.policy_version}"
    yield f"- run: {origin.run}"
    yield f"- base policy: {origin.base}; the policy that it drafts for: {policy} of this run"
    if origin.drafter_version is not None:
        yield f"- drafter version: {origin.drafter_version}"
    yield f"- training prompts: {origin.data or 'not recorded'} (hash of their ids in order)"
    licence = origin.licence or "not stated; it learned from its target's responses, whose terms apply"
    yield f"- licence: {licence}"


def _figures(measured: Measured | None) -> Iterator[str]:
    yield ""
    if measured is None:
        yield "Acceptance and speed were not measured at export."
        return
    yield f"## Measured on {measured.prompts} held-out prompts"
    yield ""
    yield from acceptance_table(measured.acceptance)
    yield ""
    yield f"Speed-up over the target alone. Costs: {measured.costs}. Timed on {measured.machine}."
    yield ""
    yield "| running requests | best depth | predicted | timed |"
    yield "|---|---|---|---|"
    for row in measured.speed:
        timed = "not timed" if row.timed is None else f"{row.timed:.2f} (chain of {row.timed_depth})"
        yield f"| {row.running} | {row.depth or 'no drafts'} | {row.predicted:.2f} | {timed} |"


def acceptance_table(rows: Sequence[AcceptanceRow]) -> Iterator[str]:
    depth = max((len(row.rates) for row in rows), default=0)
    yield f"| temperature | acceptance length | {' | '.join(f'position {k + 1}' for k in range(depth))} | how |"
    yield "|---" * (depth + 3) + "|"
    for row in rows:
        cells = [f"{rate:.3f}" for rate in row.rates] + ["-"] * (depth - len(row.rates))
        yield f"| {row.temperature:g} | {row.acceptance_length:.2f} | {' | '.join(cells)} | {row.how} |"


def _start(method: DrafterMethod, layout: Layout) -> Iterator[str]:
    sglang, vllm = _ENGINE[method.name]
    yield ""
    yield "## Start"
    yield ""
    yield "TARGET is the folder of the policy, DRAFTER this one."
    yield ""
    yield "```"
    if layout == "sglang":
        yield f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm {sglang} \\"
        yield "  --speculative-draft-model-path DRAFTER --speculative-num-steps 3 --speculative-eagle-topk 1 \\"
        yield "  --speculative-num-draft-tokens 4"
    else:
        settings = f'{{"method": "{vllm}", "model": "DRAFTER", "num_speculative_tokens": 3}}'
        yield f"vllm serve TARGET --speculative-config '{settings}'"
    yield "```"
    note = _NOTES.get((layout, method.name))
    if note:
        yield note


_NOTES = {
    ("speculators", "eagle"): (
        "\nThe speculators library reads EAGLE up to version 0.3, and vLLM does not read EAGLE in this layout: for "
        "vLLM, export with `--format hf`."
    ),
}
