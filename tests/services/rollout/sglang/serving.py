"""A rollout server over the fake SGLang engine, drained and checked."""

from __future__ import annotations

from collections.abc import Sequence

from services.core.types import GroupWork, Rollout
from services.rollout.service import RolloutService
from services.rollout.sglang.engine import SGLangEngine
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import (
    letters,
    strategy,
    ticking,
)
from tests.services.rollout.sglang.fake import FakeHandle, limits_of

MODEL, OTHER = tiny_model("llama", 32, 0, 2.0), tiny_model("llama", 32, 1, 2.0)
DRAFTER = random_drafter(spec_of(MODEL))
CHAIN, ARGMAX = strategy("eagle", 3), strategy("eagle", 3, sampled=False)
STRATEGIES = [OFF, CHAIN, ARGMAX, strategy("eagle", 3, 2, 6, sampled=False), strategy("ngram", 4)]
IDS = [s.name for s in STRATEGIES]
SWITCHED = [OFF, strategy("eagle", 1), CHAIN, strategy("eagle", 5)]
EPOCH = 1
PROMPT = (1, 7, 9, 4)


def served(s: DraftStrategy = CHAIN, capture_bytes: int = 0, **options: object) -> tuple[RolloutService, FakeHandle]:
    """A server in its first epoch that serves version 0 of both kinds."""
    handle = FakeHandle(MODEL, s, **options)  # type: ignore[arg-type]
    engine = SGLangEngine(handle, limits_of(MODEL, s, capture_bytes=capture_bytes), {s.depth: s}, letters, ticking())
    service = RolloutService(engine, {t.name: t for t in (OFF, s)}, ticking())
    service.open_epoch(EPOCH)
    service.load_policy(0, tensors_of(MODEL), EPOCH)
    if s.drafter == "eagle":
        service.load_drafter(0, DRAFTER, EPOCH)
    return service, handle


def switching(capture_bytes: int = 0, **options: object) -> tuple[RolloutService, FakeHandle]:
    """A server whose engine draws one of SWITCHED at random every round."""
    deepest = SWITCHED[-1]
    handle = FakeHandle(MODEL, switching=SWITCHED, **options)  # type: ignore[arg-type]
    limits, strategies = limits_of(MODEL, deepest, capture_bytes=capture_bytes), {s.depth: s for s in SWITCHED}
    service = RolloutService(
        SGLangEngine(handle, limits, strategies, letters, ticking()), {s.name: s for s in SWITCHED}, ticking()
    )
    service.open_epoch(EPOCH)
    service.load_policy(0, tensors_of(MODEL), EPOCH)
    service.load_drafter(0, DRAFTER, EPOCH)
    return service, handle


def drain(service: RolloutService, works: Sequence[GroupWork] = (), epoch: int = EPOCH) -> dict[str, Rollout]:
    """Submit and advance to the end; every rollout comes once, and the reports count every token once."""
    if works:
        service.submit(works, epoch)
    found: dict[str, Rollout] = {}
    tokens = 0
    for _ in range(500):
        report = service.advance(0.0, epoch)
        assert not {r.rollout_id for r in report.finished} & found.keys()
        found |= {r.rollout_id: r for r in report.finished}
        tokens += report.new_tokens
        if not report.running and not report.waiting:
            break
    else:
        raise AssertionError("the server does not come to an end")
    if works:
        assert found.keys() == {f"{w.group_id}#{i}" for w in works for i in w.indices}
        assert tokens == sum(len(r.response_ids) for r in found.values())
    return found


def check_counters(r: Rollout, s: DraftStrategy) -> None:
    """Rows 5 and 9."""
    a = r.acceptance
    assert a.num_accepted_tokens + a.verify_steps <= len(r.response_ids)
    if s.is_off:
        assert a.histogram == () and a.steps_by_strategy == {"off": len(r.response_ids)}
    elif a.verify_steps:
        assert a.steps_by_strategy == {s.name: a.verify_steps}
        assert a.proposed == a.verify_steps * (s.num_draft_tokens - 1)
        assert 1.0 <= a.acceptance_length <= s.num_draft_tokens and 0.0 <= a.acceptance_rate <= 1.0
