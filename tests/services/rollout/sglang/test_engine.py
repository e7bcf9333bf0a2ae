"""The SGLang adapter through the rollout server, over a fake engine that computes for real: responses and reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.core.errors import (
    ConfigError,
    RequestError,
    ServiceLostError,
    StaleEpochError,
    WaitTimeoutError,
)
from services.core.types import FinishReason, SamplingParams, ServedVersions
from services.rollout.native import NativeEngine
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex
from tests.services.models.tiny import tensors_of
from tests.services.rollout.engines import (
    GREEDY,
    check_all,
    finish,
    group,
    letters,
    make_engine,
    reference,
)
from tests.services.rollout.sglang.serving import (
    CHAIN,
    EPOCH,
    IDS,
    MODEL,
    PROMPT,
    STRATEGIES,
    check_counters,
    drain,
    served,
)

# ------------------------------------------------------------------ responses


@pytest.mark.parametrize("s", STRATEGIES, ids=IDS)
def test_rows_10_and_11_whole_groups_with_a_logprob_for_every_token(s: DraftStrategy) -> None:
    service, handle = served(s)
    works = [
        group((1, 5 + n, 9), 4, SamplingParams(temperature=1.0, max_tokens=9 + n), first_seed=50 * n) for n in range(3)
    ]
    found = drain(service, works)
    for submission, part in zip(handle.submissions, (slice(0, 1), slice(1, 4)), strict=True):
        assert [(one.prompt_ids, one.seed) for one in submission] == [
            (w.prompt.token_ids, seed) for w in works for seed in w.seeds[part]
        ], "a prompt's first rollout, then its siblings"
    for w in works:
        for index, seed in zip(w.indices, w.seeds, strict=True):
            r = found[f"{w.group_id}#{index}"]
            assert (r.group_id, r.prompt_id, r.index, r.seed) == (w.group_id, w.prompt.id, index, seed)
            assert r.prompt_ids == w.prompt.token_ids and r.sampling == w.sampling and r.server == "rollout-3"
            assert len(r.rollout_logprobs) == len(r.response_ids) == w.sampling.max_tokens
            assert r.finish_reason is FinishReason.LENGTH and r.text == letters(r.response_ids)
            assert r.started_s < r.finished_s and r.policy_versions == (0,)
            check_counters(r, s)
    assert len({r.response_ids for r in found.values()}) > 6, "seeds make no difference"


@pytest.mark.parametrize("s", STRATEGIES, ids=IDS)
def test_logprobs_are_the_models(s: DraftStrategy) -> None:
    service, _ = served(s)
    for r in drain(service, [group(PROMPT, 4, SamplingParams(temperature=0.7, max_tokens=20))]).values():
        ids = torch.tensor([[*r.prompt_ids, *r.response_ids]])
        with torch.no_grad():
            logits = MODEL(input_ids=ids).logits[0, len(PROMPT) - 1 : -1] / 0.7
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(r.response_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(r.rollout_logprobs), wanted, atol=1e-4)


@pytest.mark.parametrize("s", STRATEGIES, ids=IDS)
def test_greedy_is_plain_decoding(s: DraftStrategy) -> None:
    service, _ = served(s)
    found = drain(service, [group((2, 3 + n), 2, GREEDY, name=f"g{n}") for n in range(4)])
    check_all(MODEL, found)


def test_a_greedy_token_has_logprob_zero_whatever_sglang_tells() -> None:
    """SGLang scores greedy tokens at temperature 1."""
    service, handle = served(OFF)
    service.submit([group(PROMPT, 1)], EPOCH)
    poll = handle.poll

    def scored(wait_s: float):
        return [replace(u, logprobs=tuple(-0.5 for _ in u.logprobs)) for u in poll(wait_s)]

    handle.poll = scored  # type: ignore[method-assign]
    (r,) = drain(service).values()
    assert r.rollout_logprobs == (0.0,) * GREEDY.max_tokens


@pytest.mark.parametrize("behind_stop", [False, True], ids=["cut", "behind_stop"])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("s", [CHAIN, STRATEGIES[3], OFF], ids=lambda s: s.name)
def test_rows_1_5_and_6_a_stop_id_ends_the_response_wherever_it_lies(
    s: DraftStrategy, rounds: int, behind_stop: bool
) -> None:
    """Every possible stop position and cap: what lies behind is cut, the earlier of both is the reason, and no counter
    runs past what was emitted."""
    plain, _ = reference(MODEL, PROMPT, 14)
    for cap in (1, 5, 14):
        for stop in {plain[0], plain[3], plain[6], 31}:
            service, _ = served(s, behind_stop=behind_stop, rounds=rounds)
            sampling = SamplingParams(temperature=0.0, max_tokens=cap, stop_token_ids=(stop,))
            (r,) = drain(service, [group(PROMPT, 1, sampling)]).values()
            at = plain.index(stop) + 1 if stop in plain else 99
            assert list(r.response_ids) == plain[: min(at, cap)], (cap, stop)
            assert r.finish_reason is (FinishReason.STOP if at <= cap else FinishReason.LENGTH)
            check_counters(r, s)


@pytest.mark.parametrize("rounds", [1, 3, 50])
@pytest.mark.parametrize("s", [CHAIN, OFF], ids=lambda s: s.name)
def test_row_4_stop_strings_are_the_adapters(s: DraftStrategy, rounds: int) -> None:
    """They are found in the text of all ids, also when several verify steps were told at once; the request is aborted
    in the engine, whose news of it come late and are nobody's."""
    plain, _ = reference(MODEL, PROMPT, 30)
    text = letters(plain)
    for start in (0, 9):
        wanted = text[start : start + 2]
        at = text.find(wanted)
        service, handle = served(s, rounds=rounds)
        sampling = SamplingParams(temperature=0.0, max_tokens=30, stop_strings=("~", wanted))
        service.submit([group(PROMPT, 1, sampling), group((3, 8), 1, replace(GREEDY, max_tokens=20))], EPOCH)
        found = drain(service)
        r = found["g1-7-9-4/0#0"]
        assert r.text == text[:at] and list(r.response_ids) == plain[: at + 2]
        assert r.finish_reason is FinishReason.STOP
        assert len(handle.aborts) == (rounds < 50), "aborted once, unless it had ended by itself"
        check_counters(r, s)
        check_all(MODEL, found)


def test_a_stop_string_before_the_stop_id_of_the_same_step_wins() -> None:
    plain, _ = reference(MODEL, PROMPT, 8)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=20, stop_strings=(letters(plain[2:3]),), stop_token_ids=(plain[4],)
    )
    service, _ = served(CHAIN, behind_stop=True, rounds=9)
    (r,) = drain(service, [group(PROMPT, 1, sampling)]).values()
    first = min(plain.index(plain[2]), plain.index(plain[4]))
    assert list(r.response_ids) == plain[: first + 1] and r.finish_reason is FinishReason.STOP
    check_counters(r, CHAIN)


def test_a_models_own_end_of_sequence_ends_a_response() -> None:
    plain, _ = reference(MODEL, PROMPT, 16)
    service, _ = served(CHAIN, model_eos=(plain[5],))
    (r,) = drain(service, [group(PROMPT, 1)]).values()
    assert list(r.response_ids) == plain[: plain.index(plain[5]) + 1] and r.finish_reason is FinishReason.STOP


def test_no_request_id_begins_with_another() -> None:
    """SGLang aborts every request whose id begins with the one it is told: g#1 must not take g#10 along, nor the first
    life of a rollout its tenth."""
    service, handle = served(OFF, rows=32)
    rids: list[str] = []
    for epoch in range(2, 14):
        service.open_epoch(epoch)
        service.submit([group((1, 2), 12, name="g"), group((1, 3), 1, name="g1")], epoch)
        rids += handle._lives
    assert len(set(rids)) == 12 * 13
    assert not [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]


def test_a_shortened_budget_is_an_error_not_a_short_response() -> None:
    for budget, said in ((7, "after 7 of 16 tokens"), (0, "after 0 of 16 tokens")):
        service, _ = served(CHAIN, budget=budget)
        service.submit([group(PROMPT, 1)], EPOCH)
        with pytest.raises(RequestError, match=said + r".*raise kv_tokens or mem_fraction, or lower max_len"):
            drain(service)


def test_fewer_logprobs_than_tokens_are_refused() -> None:
    service, handle = served()
    service.submit([group(PROMPT, 2)], EPOCH)
    service.advance(0.0, EPOCH)
    handle.faults.short_logprobs = 1
    with pytest.raises(RequestError, match=r"SGLang sent \d+ logprobs for \d+ tokens.*check the SGLang version"):
        drain(service)


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_request_that_sglang_gives_up_says_why(rounds: int) -> None:
    """SGLang's last news of it hold one id and all logprobs: that is not the complaint."""
    service, handle = served()
    service.submit([group(PROMPT, 1)], EPOCH)
    for _ in range(rounds):
        service.advance(0.0, EPOCH)
    handle.faults.abort_message = "out of memory"
    with pytest.raises(RequestError, match="g1-7-9-4/0#0: SGLang gave the request up: out of memory"):
        service.advance(0.0, EPOCH)


def test_a_dead_engine_is_a_lost_service() -> None:
    service, handle = served()
    service.submit([group(PROMPT, 1)], EPOCH)
    handle.faults.dead = True
    for call in (
        lambda: service.advance(0.0, EPOCH),
        lambda: service.load_policy(1, tensors_of(MODEL), EPOCH),
        lambda: service.open_epoch(2),
        lambda: service.submit([group((1, 2), 1)], EPOCH),
    ):
        with pytest.raises(ServiceLostError):
            call()


# ------------------------------------------------------------------ reports, epochs, checks


def test_acceptance_is_streamed_while_requests_run() -> None:
    service, _ = served(CHAIN)
    work = [group((1, 5, n), 2, replace(GREEDY, max_tokens=40)) for n in range(2, 5)]
    service.submit(work, EPOCH)
    first = service.advance(0.0, EPOCH)
    assert len(first.running) == 6 and first.waiting == 0 and first.new_tokens == 6
    assert all(r.acceptance.verify_steps == 0 and r.num_tokens == 1 for r in first.running), "the prefill's token"
    for n in range(1, 6):
        report = service.advance(0.0, EPOCH)
        assert report.strategy == CHAIN.name and report.versions == ServedVersions(0, 0)
        assert {r.rollout_id for r in report.running} == {f"{w.group_id}#{i}" for w in work for i in w.indices}
        for r in report.running:
            assert r.acceptance.verify_steps == n and r.acceptance.steps_by_strategy == {CHAIN.name: n}
            assert 1 + n + r.acceptance.num_accepted_tokens == r.num_tokens


def test_requests_without_a_token_are_waiting() -> None:
    service, _ = served(CHAIN, rows=4)
    service.submit([group((1, 5, n), 2) for n in range(2, 5)], EPOCH)
    report = service.advance(0.0, EPOCH)
    assert len(report.running) == 4 and report.waiting == 2
    assert len(drain(service)) == 6
    idle = service.advance(0.0, EPOCH)
    assert (idle.finished, idle.running, idle.waiting, idle.new_tokens) == ((), (), 0, 0)


@pytest.mark.parametrize("s", [OFF, CHAIN], ids=lambda s: s.name)
def test_another_epoch_drops_everything_and_its_late_news(s: DraftStrategy) -> None:
    service, handle = served(s, rows=4)
    service.submit([group((1, 5, n), 2) for n in range(2, 5)], EPOCH)
    service.advance(0.0, EPOCH)
    assert service.open_epoch(EPOCH).policy == 0
    assert len(service.advance(0.0, EPOCH).running) == 4, "the same epoch again drops nothing"
    handle._round()  # news that nobody has heard yet
    service.open_epoch(2)
    report = service.advance(0.0, 2)
    assert (report.running, report.waiting, report.finished) == ((), 0, ())
    with pytest.raises(StaleEpochError):
        service.submit([group((1, 2), 1)], EPOCH)
    again = drain(service, [group((1, 5, 2), 2)], 2)
    check_all(MODEL, again)
    assert all(len(r.response_ids) == GREEDY.max_tokens for r in again.values())


def test_the_same_group_again_after_an_abort_is_another_request() -> None:
    """News of its first life, which may still be under way in SGLang, are not taken for its second."""
    service, handle = served(OFF)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, stop_strings=(letters(reference(MODEL, PROMPT, 1)[0]),))
    work = [group(PROMPT, 1, sampling)]
    service.submit(work, EPOCH)
    assert len(service.advance(0.0, EPOCH).finished) == 1 and handle._lives, "SGLang has not heard of the abort yet"
    service.submit(work, EPOCH)
    (r,) = drain(service).values()
    assert len(r.response_ids) == 1
    service.open_epoch(2)
    check_all(MODEL, drain(service, [group(PROMPT, 1)], 2))
    assert len(handle.aborts) == len(set(handle.aborts)) == 2


def test_an_abort_that_does_not_end_is_told_and_nothing_is_forgotten() -> None:
    service, handle = served()
    service.submit([group(PROMPT, 1)], EPOCH)
    service.advance(0.0, EPOCH)
    handle.faults.stuck = True
    with pytest.raises(WaitTimeoutError, match="dropping all requests"):
        service.open_epoch(2)
    assert len(service.advance(0.0, EPOCH).running) == 1, "the old epoch still holds"
    handle.faults.stuck = False
    service.open_epoch(2)
    assert not service.advance(0.0, 2).running


@pytest.mark.parametrize(
    ("ids", "changes", "said"),
    [
        ((), {}, "non-empty list of ids"),
        ((1, 32), {}, r"ids in \[0, 32\)"),
        ((1, -1), {}, r"ids in \[0, 32\)"),
        ((1, 2), {"max_tokens": 119}, "exceed rollout.engine.max_len 120: shorten the prompt or raise max_len"),
        ((1, 2), {"top_k": 5}, "use the native engine"),
        ((1, 2), {"top_p": 0.9}, "use the native engine"),
        ((1, 2), {"min_p": 0.1}, "use the native engine"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    ids: tuple[int, ...], changes: dict[str, float], said: str
) -> None:
    service, handle = served()
    with pytest.raises(RequestError, match=said):
        service.submit([group((3, 4), 1), group(ids, 1, replace(GREEDY, **changes))], EPOCH)
    assert not handle.submissions and service.advance(0.0, EPOCH).waiting == 0


def test_a_request_may_fill_max_len() -> None:
    service, _ = served()
    (r,) = drain(service, [group(PROMPT, 1, replace(GREEDY, max_tokens=116))]).values()
    assert len(r.response_ids) == 116


def test_the_strategy_is_the_one_it_was_started_with() -> None:
    service, _ = served(CHAIN)
    service.set_strategy(CHAIN.name, EPOCH)
    service.set_strategy(None, EPOCH)
    with pytest.raises(ConfigError, match="with eagle_3_1_4 and cannot change to off: name it in speculation"):
        service.set_strategy("off", EPOCH)
    with pytest.raises(ConfigError, match="'eagle_9_1_10' is not configured"):
        service.set_strategy("eagle_9_1_10", EPOCH)


def test_the_fake_computes_what_the_native_engine_does() -> None:
    """Without drafts both draw the same numbers: sampled responses and their logprobs are equal."""
    works = [
        group((1, 5 + n, 9), 2, SamplingParams(temperature=1.0, max_tokens=12), first_seed=9 * n) for n in range(2)
    ]
    service, _ = served(OFF)
    native: NativeEngine = make_engine(MODEL, OFF, index=SuffixIndex(1000))
    wanted = finish(native, works)
    for key, r in drain(service, works).items():
        assert r.response_ids == wanted[key].response_ids
        assert r.rollout_logprobs == pytest.approx(wanted[key].rollout_logprobs, abs=1e-5)
        assert (r.finish_reason, r.text) == (wanted[key].finish_reason, wanted[key].text)
