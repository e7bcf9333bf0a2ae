"""Exported drafters in a stock `sglang.Engine` that knows nothing of this project: they load, and are accepted as often
as they should be. The yardstick replays the rounds of the engine's own responses (exact at temperature 0, but for
tokens that bfloat16 rounds the other way)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deploy.drafter_judge import Judge
from services.drafter.card import Origin
from services.drafter.evaluate import chain_reach_of
from services.drafter.export import write_export
from services.drafter.layouts import Verifier
from services.drafter.published import PublishedDrafter, read_published
from services.models.drafter import OWN_HEAD
from services.models.eagle3 import Eagle3
from tests.gpu.reference import Reference
from tests.gpu.stock_engine import acceptance_length, stock_engine, verify_steps

pytestmark = pytest.mark.timeout(600)

DEPTH, PROMPTS, MAX_TOKENS = 3, 24, 512
CLOSE = 0.02
ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3"}


@dataclass(frozen=True)
class Kind:
    folder: str
    own_head: bool = False


KINDS = {
    "eagle": Kind("drafter"), "eagle3": Kind("drafter-eagle3"), "eagle3_own_head": Kind("drafter-eagle3", own_head=True)
}  # fmt: skip


@pytest.fixture(scope="module")
def judge(model: Path) -> Judge:
    return Judge(str(model / "target"))


def with_own_head(found: PublishedDrafter, judge: Judge) -> PublishedDrafter:
    """The target's rows of two tokens out of three: never drafting the others must show in the acceptance."""
    ids = tuple(v for v in range(judge.spec.vocab_size) if v % 3)
    assert isinstance(found.method, Eagle3)
    method = Eagle3(found.method.target, found.method.layers, ids)
    head = judge.head.head[list(ids)].cpu().to(found.tensors["fc.weight"].dtype)
    return PublishedDrafter(method, {**found.tensors, OWN_HEAD: head}, found.layout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stock_engine_accepts_what_it_should(
    kind: str, judge: Judge, reference: Reference, save: Callable[[str, dict[str, Any]], None], tmp_path: Path
) -> None:
    found = read_published(judge.folder.parent / KINDS[kind].folder, judge.folder)
    if KINDS[kind].own_head:
        found = with_own_head(found, judge)
    origin = Origin("a warm-up", str(judge.folder), None, None, None, 0)
    verifier = Verifier(judge.config, str(judge.folder))
    write_export(found.tensors, found.method, "sglang", verifier, origin, None, tmp_path / "drafter")
    job = {
        "target": str(judge.folder), "drafter": str(tmp_path / "drafter"), "depth": DEPTH, "eos": reference.eos,
        "algorithm": ALGORITHMS[found.method.name], "prompts": reference.heldout[:PROMPTS], "max_tokens": MAX_TOKENS,
        "batches": [PROMPTS], "repeats": 1, "temperature": 0.0,
    }  # fmt: skip
    ((call,),) = (cell["calls"] for cell in stock_engine(job, tmp_path))
    told = call["answers"]
    length, steps = acceptance_length(told), verify_steps(told)
    answers = [SimpleNamespace(prompt_ids=p, response_ids=a["ids"]) for p, a in zip(job["prompts"], told, strict=True)]
    states = judge.states(answers, found.method.aux_layers)  # type: ignore[arg-type]
    wanted = chain_reach_of(found.method, found.tensors, judge.head, states, DEPTH, 0.0)
    record = {
        "acceptance_length": round(length, 4), "wanted": round(wanted.acceptance_length, 4), "verify_steps": steps,
        "rounds": wanted.rounds, "card": torch.cuda.get_device_name(), "sglang": "stock",
    }  # fmt: skip
    save(f"export_{kind}", record)
    assert length > 1.2, "nothing is accepted: the engine drafts with something else"
    assert length == pytest.approx(wanted.acceptance_length, rel=CLOSE), record
