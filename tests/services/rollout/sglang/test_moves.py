"""Moving running responses from and to an SGLang engine: it sees the rest of them only, the rollout has all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.core.errors import RequestError
from services.core.types import FinishReason, GroupWork, PartialRollout, Rollout, SamplingParams
from services.models.capture import target_states
from services.rollout.request import continued_seed
from services.rollout.service import RolloutService
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.models.tiny import tensors_of
from tests.services.rollout.engines import GREEDY, check_all, group, letters, make_engine, reference, ticking
from tests.services.rollout.sglang.serving import (
    CHAIN,
    DRAFTER,
    EPOCH,
    IDS,
    MODEL,
    OTHER,
    PROMPT,
    STRATEGIES,
    check_counters,
    drain,
    served,
)
from tests.services.rollout.test_moves import continuing

ROOM = 2**20


def withdraw(service: RolloutService, works: list[GroupWork], advances: int) -> tuple[list[Rollout], list[GroupWork]]:
    """Rollouts that came before all were withdrawn, and the work that is left."""
    service.submit(works, EPOCH)
    early = [r for _ in range(advances) for r in service.advance(0.0, EPOCH).finished]
    out = service.withdraw([f"{w.group_id}#{i}" for w in works for i in w.indices], EPOCH)
    early += drain(service).values()
    assert not {r.rollout_id for r in early} & {p.rollout_id for p in out}
    return early, continuing(works, out)


@pytest.mark.parametrize("advances", [0, 1, 2, 4])
@pytest.mark.parametrize("s", STRATEGIES, ids=IDS)
def test_greedy_is_plain_decoding_and_every_number_covers_the_whole(s: DraftStrategy, advances: int) -> None:
    (source, _), (destination, handle) = served(s), served(s)
    works = [group((2, 3 + n), 2, SamplingParams(temperature=0.0, max_tokens=9 + 4 * n)) for n in range(3)]
    early, left = withdraw(source, works, advances)
    assert left
    found = {r.rollout_id: r for r in early} | drain_counted(destination, left)
    assert len(found) == 6
    check_all(MODEL, found)
    partials = {p.rollout_id: p for w in left for p in w.partials}
    for r in found.values():
        assert len(r.response_ids) == r.sampling.max_tokens and r.finish_reason is FinishReason.LENGTH
        assert r.text == letters(r.response_ids) and r.policy_versions == (0,)
        check_counters(r, s) if not s.is_off else None
        if r.rollout_id in partials:
            known = partials[r.rollout_id]
            assert r.response_ids[: len(known.response_ids)] == known.response_ids and r.started_s == known.started_s
            assert sum(r.acceptance.histogram) >= sum(known.acceptance.histogram)
    assert sorted(handle.seen_seeds) == sorted(
        continued_seed(seed, len(p.response_ids) if (p := w.partial(i)) else 0)
        for w in left
        for i, seed in zip(w.indices, w.seeds, strict=True)
    )


def drain_counted(service: RolloutService, works: list[GroupWork]) -> dict[str, Rollout]:
    """As `drain`, where what other servers generated is not counted."""
    service.submit(works, EPOCH)
    found, tokens = {}, 0
    for _ in range(200):
        report = service.advance(0.0, EPOCH)
        tokens += report.new_tokens
        found |= {r.rollout_id: r for r in report.finished}
        assert all(r.num_tokens > 0 for r in report.running)
        if not report.running and not report.waiting:
            break
    known = sum(len(p.response_ids) for w in works for p in w.partials)
    assert tokens == sum(len(r.response_ids) for r in found.values()) - known
    return found


@pytest.mark.parametrize("s", [OFF, CHAIN], ids=lambda s: s.name)
def test_logprobs_are_the_models_before_and_after_the_cut(s: DraftStrategy) -> None:
    (source, _), (destination, _) = served(s), served(s)
    _, left = withdraw(source, [group(PROMPT, 4, SamplingParams(temperature=0.7, max_tokens=20))], 3)
    assert any(p.response_ids for w in left for p in w.partials)
    for r in drain_counted(destination, left).values():
        ids = torch.tensor([[*r.prompt_ids, *r.response_ids]])
        with torch.no_grad():
            logits = MODEL(input_ids=ids).logits[0, len(PROMPT) - 1 : -1] / 0.7
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(r.response_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(r.rollout_logprobs), wanted, atol=1e-4)


def test_a_response_that_finished_meanwhile_is_told_once_and_not_handed_back() -> None:
    """SGLang goes on by itself: the end of one is among the news that were not asked for yet."""
    service, _ = served(OFF)
    short, long = SamplingParams(temperature=0.0, max_tokens=2), SamplingParams(temperature=0.0, max_tokens=20)
    works = [group(PROMPT, 1, short, name="short"), group(PROMPT, 1, long, name="long")]
    service.submit(works, EPOCH)
    first = service.advance(0.0, EPOCH)
    assert not first.finished
    (left,) = service.withdraw(["short#0", "long#0"], EPOCH)
    assert left.rollout_id == "long#0" and len(left.response_ids) == 2
    report = service.advance(0.0, EPOCH)
    assert [r.rollout_id for r in report.finished] == ["short#0"] and not report.running and not report.waiting
    assert first.new_tokens + report.new_tokens == 4
    assert not service.advance(0.0, EPOCH).finished


def test_nothing_of_a_new_epoch_is_the_old_ones() -> None:
    service, _ = served(OFF)
    service.submit([group(PROMPT, 1, SamplingParams(temperature=0.0, max_tokens=1))], EPOCH)
    assert service.withdraw(["nobody#0"], EPOCH) == ()  # the one token came with this look
    service.open_epoch(EPOCH + 1)
    assert not service.advance(0.0, EPOCH + 1).finished


def test_an_empty_engine_is_waited_for_and_a_shared_one_is_not() -> None:
    service, handle = served(OFF)
    works = [group(PROMPT, 2, GREEDY)]
    service.submit(works, EPOCH)
    service.advance(0.0, EPOCH)
    service.withdraw([f"{works[0].group_id}#0"], EPOCH)
    assert len(handle.aborts) == 1 and len(handle._lives) == 2, "the other one goes on, this one ends a round later"
    service.withdraw([f"{works[0].group_id}#1"], EPOCH)
    assert len(handle.aborts) == 2 and not handle._lives and not handle.native.num_running
    assert not service.advance(0.0, EPOCH).finished


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("s", [OFF, CHAIN], ids=lambda s: s.name)
def test_stop_strings_straddle_the_cut(s: DraftStrategy, rounds: int) -> None:
    plain, _ = reference(MODEL, PROMPT, 14)
    p = SamplingParams(temperature=0.0, max_tokens=14, stop_strings=(letters(plain[2:9]),))
    (source, _), (destination, _) = served(s), served(s, rounds=rounds)
    early, left = withdraw(source, [group(PROMPT, 1, p)], 2)
    assert not early and 2 <= len(left[0].partials[0].response_ids) < 9
    (r,) = drain_counted(destination, left).values()
    assert list(r.response_ids) == plain[:9] and r.finish_reason is FinishReason.STOP and r.text == letters(plain[:2])
    check_counters(r, s) if not s.is_off else None


def test_from_the_native_engine_and_to_it() -> None:
    """A partial is no engine's own."""
    (sglang, _), (again, _) = served(OFF), served(OFF)
    native = RolloutService(make_engine(MODEL), {OFF.name: OFF}, ticking())
    native.open_epoch(EPOCH)
    work = [group(PROMPT, 2, SamplingParams(temperature=0.0, max_tokens=20))]
    for service in (sglang, native):
        early, work = withdraw(service, work, 3)
        assert not early
    found = drain_counted(again, work)
    check_all(MODEL, found)
    assert all(r.acceptance.steps_by_strategy == {"off": 20} for r in found.values())


def test_a_policy_load_on_either_side_of_the_cut_is_listed() -> None:
    (source, _), (destination, _) = served(CHAIN), served(CHAIN)
    source.submit([group(PROMPT, 1, SamplingParams(max_tokens=20))], EPOCH)
    source.advance(0.0, EPOCH)
    source.load_policy(1, tensors_of(OTHER), EPOCH)
    source.advance(0.0, EPOCH)
    (left,) = source.withdraw([f"{group(PROMPT, 1).group_id}#0"], EPOCH)
    destination.load_policy(1, tensors_of(OTHER), EPOCH)
    destination.load_drafter(3, DRAFTER, EPOCH)
    (r,) = drain_counted(
        destination, [replace(group(PROMPT, 1, SamplingParams(max_tokens=20)), partials=(left,))]
    ).values()
    assert r.policy_versions == (0, 1) and r.drafter_versions == (0, 3)


def test_a_finished_partial_is_refused() -> None:
    service, _ = served(OFF)
    work = group(PROMPT, 1, SamplingParams(max_tokens=3))
    known = PartialRollout(
        work.group_id, 0, (1, 2, 3), (0.0,) * 3, (0,), (), drain(served(OFF)[0], [work]).popitem()[1].acceptance, 0.0
    )
    with pytest.raises(RequestError, match="3 tokens of 3 are there already"):
        service.submit([replace(work, partials=(known,))], EPOCH)


# -- hidden states


@pytest.mark.parametrize("advances", [1, 3])
def test_states_of_a_moved_rollout_are_right_or_missing(advances: int) -> None:
    """The engine that ends it computed all its tokens, most of them as a prompt; the other one's are nobody's."""
    (source, _), (destination, _) = served(CHAIN, capture_bytes=ROOM), served(CHAIN, capture_bytes=ROOM)
    works = [
        replace(group((1, 7, n), 3, SamplingParams(max_tokens=14), first_seed=9 * n), keep_states=True)
        for n in range(2)
    ]
    source.submit(works, EPOCH)
    early = [r for _ in range(advances) for r in source.advance(0.0, EPOCH).finished]
    out = source.withdraw([f"{w.group_id}#{i}" for w in works for i in (0, 2)], EPOCH)
    assert out and any(p.response_ids for p in out)
    here = {r.rollout_id: r for r in early} | drain(source)
    there = drain_counted(destination, continuing(works, out))
    for service, found in ((source, here), (destination, there)):
        chunk, states = service.take_states(1, EPOCH)
        assert chunk.num_sequences == len(states) and chunk.num_missing <= len(found)
        whole = [(*r.prompt_ids, *r.response_ids) for r in found.values()]
        for s in states:
            cut = tuple(s.input_ids.tolist())
            assert any(ids[: len(cut)] == cut for ids in whole)
            with torch.no_grad():
                wanted, _ = target_states(MODEL.base_model, (), input_ids=s.input_ids[None])
            assert torch.allclose(s.hidden, wanted[0], atol=1e-5)
            assert s.loss_mask.tolist() == [n >= 3 for n in range(len(cut))]
        if service is destination:
            assert chunk.num_missing == 0, "all of them were computed there"


# -- how long prefills take


def test_prefill_times_are_bounded_from_above() -> None:
    """From the first request without a token to the last one's first token; dropped requests tell nothing."""
    service, handle = served(OFF)
    poll, polls = handle.poll, []
    handle.poll = lambda wait_s: poll(wait_s) if polls.append(1) or len(polls) > 3 else []  # type: ignore[method-assign]
    service.submit([group(PROMPT, 2, GREEDY)], EPOCH)
    reports = [service.advance(0.0, EPOCH) for _ in range(5)]
    assert [r.prefill_tokens for r in reports] == [0, 0, 0, len(PROMPT), 0]
    assert reports[3].prefill_s > 0.0 == reports[0].prefill_s == reports[4].prefill_s
    service.submit([group((5, 6), 1, GREEDY)], EPOCH)
    service.open_epoch(EPOCH + 1)
    assert service.advance(0.0, EPOCH + 1).prefill_tokens == 0
