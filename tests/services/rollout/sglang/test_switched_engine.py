"""The adapter of an engine that takes another strategy every round: losslessness, accounting, forced strategies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.core.errors import ConfigError
from services.core.types import GroupWork, Rollout, SamplingParams
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.models.tiny import random_drafter, spec_of, tensors_of
from tests.services.rollout.engines import GREEDY, check_all, group, strategy
from tests.services.rollout.sglang.serving import (
    CHAIN,
    DRAFTER,
    EPOCH,
    MODEL,
    OTHER,
    PROMPT,
    SWITCHED,
    drain,
    served,
    switching,
)

NAMES = {s.name: s for s in SWITCHED}
ROOM = 2**24


def check_accounting(r: Rollout) -> None:
    """Every emitted token but the prefills' belongs to exactly one round of one strategy."""
    a = r.acceptance
    assert a.steps_by_strategy.keys() <= NAMES.keys() and OFF.name not in a.accepted_by_strategy
    drafted = {name: n for name, n in a.steps_by_strategy.items() if name != OFF.name}
    assert sum(drafted.values()) == a.verify_steps
    assert sum(a.accepted_by_strategy.values()) == a.num_accepted_tokens
    assert a.proposed == sum(n * NAMES[name].depth for name, n in drafted.items())
    assert all(a.accepted_by_strategy[name] <= n * NAMES[name].depth for name, n in drafted.items())
    rounds = sum(a.steps_by_strategy.values())
    assert rounds + a.num_accepted_tokens <= len(r.response_ids) - 1


def works(sampling: SamplingParams, count: int = 6) -> list[GroupWork]:
    return [group((1, 3 + n, 8), 2, sampling, first_seed=9 * n) for n in range(count)]


def test_greedy_output_is_that_of_the_model_whatever_runs_and_every_strategy_is_counted() -> None:
    service, _ = switching()
    found = drain(service, works(SamplingParams(temperature=0.0, max_tokens=40)))
    seen: set[str] = set()
    check_all(MODEL, found)
    for r in found.values():
        check_accounting(r)
        assert sum(r.acceptance.steps_by_strategy.values()) + r.acceptance.num_accepted_tokens == 39
        seen |= r.acceptance.steps_by_strategy.keys()
    assert seen == NAMES.keys()


def test_weights_loaded_in_between_and_switches_go_together() -> None:
    service, _ = switching()
    service.submit(works(SamplingParams(temperature=0.0, max_tokens=60)), EPOCH)
    for version in range(1, 4):
        for _ in range(3):
            assert not service.advance(0.0, EPOCH).finished
        service.load_policy(version, tensors_of(MODEL), EPOCH)
        service.load_drafter(version, random_drafter(spec_of(OTHER)) if version % 2 else DRAFTER, EPOCH)
    found = drain(service)
    check_all(MODEL, found)
    for r in found.values():
        assert r.policy_versions == (0, 1, 2, 3)
        check_accounting(r)
        rounds = sum(r.acceptance.steps_by_strategy.values())
        counted = rounds + r.acceptance.num_accepted_tokens
        assert 60 - 4 <= counted <= 59, "one token of each prefill, but what the last round had too many is counted in"


@pytest.mark.parametrize("forced", SWITCHED, ids=[s.name for s in SWITCHED])
def test_a_forced_strategy_holds_from_the_next_round_on(forced: DraftStrategy) -> None:
    service, _ = switching()
    service.set_strategy(forced.name, EPOCH)
    work = works(SamplingParams(temperature=1.0, max_tokens=20), 2)
    for r in drain(service, work).values():
        assert r.acceptance.steps_by_strategy.keys() == {forced.name}
        check_accounting(r)
    service.set_strategy(None, EPOCH)
    names = {n for r in drain(service, works(GREEDY)).values() for n in r.acceptance.steps_by_strategy}
    assert len(names) > 1


def test_the_report_names_the_newest_rounds_strategy_and_brings_the_choices() -> None:
    service, handle = switching()
    service.submit(works(SamplingParams(temperature=1.0, max_tokens=40), 2), EPOCH)
    service.advance(0.0, EPOCH)  # prefills
    for name in (CHAIN.name, OFF.name, "eagle_5_1_6"):
        service.set_strategy(name, EPOCH)
        for _ in range(2):
            report = service.advance(0.0, EPOCH)
            assert report.strategy == name == handle.native.last_strategy.name
            assert report.spans == (), "asking at every report would hold SGLang up"
    while report.running:
        report = service.advance(0.0, EPOCH)
    assert {s.strategy for s in report.spans} == {CHAIN.name, OFF.name, "eagle_5_1_6"}
    assert all(s.running_first == 4 and s.tokens >= s.verify_steps for s in report.spans)


def test_a_strategy_it_was_not_started_with_is_refused() -> None:
    service, _ = switching()
    with pytest.raises(ConfigError, match="is not configured"):
        service.set_strategy("eagle_4_1_5", EPOCH)
    with pytest.raises(ConfigError, match="started with off, eagle_1_1_2, eagle_3_1_4, eagle_5_1_6"):
        service._engine.force_strategy(strategy("eagle", 4))


def test_a_part_is_counted_like_a_whole() -> None:
    """A response that goes on at another server keeps the rounds of both, by strategy."""
    service, _ = switching()
    work = group(PROMPT, 2, SamplingParams(temperature=0.0, max_tokens=50))
    service.submit([work], EPOCH)
    for _ in range(6):
        service.advance(0.0, EPOCH)
    left = service.withdraw([f"{work.group_id}#{i}" for i in work.indices], EPOCH)
    assert len(left) == 2
    for part in left:
        a = part.acceptance
        assert sum(a.steps_by_strategy.values()) + a.num_accepted_tokens == len(part.response_ids) - 1


def test_hidden_states_of_verifications_of_every_width() -> None:
    """Rows lie as the round's own strategy laid them: none is missing, none is another token's."""
    service, _ = switching(capture_bytes=ROOM)
    sampling = SamplingParams(temperature=1.0, max_tokens=30)
    found = drain(service, [replace(w, keep_states=True) for w in works(sampling, 4)])
    assert len({n for r in found.values() for n in r.acceptance.steps_by_strategy}) == len(SWITCHED)
    chunk, kept = service.take_states(0, EPOCH)
    assert chunk.num_missing == 0 and chunk.num_sequences == len(found) == len(kept)
    for states in kept:
        with torch.no_grad():
            wanted = MODEL.base_model(input_ids=states.input_ids[None], use_cache=False).last_hidden_state[0]
        assert torch.allclose(states.hidden, wanted, atol=1e-4)


def test_an_engine_with_one_strategy_is_not_asked_for_its_choices() -> None:
    service, handle = served(CHAIN)
    handle.take_spans = lambda: pytest.fail("it has none")  # type: ignore[method-assign]
    assert service.advance(0.0, EPOCH).spans == ()
