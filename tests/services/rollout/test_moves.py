"""A response that is moved to another engine in the middle is the response it would have been: greedily to the token,
at temperature to the law; with one logprob, one count and one version list for all of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import RequestError, StaleEpochError
from services.core.types import FinishReason, GroupWork, PartialRollout, Rollout, SamplingParams
from services.rollout.native import NativeEngine
from services.rollout.request import continued_seed
from services.rollout.service import RolloutService
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex
from tests.services.models.tiny import markov_model, perfect_drafter, random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import (
    CHAINS,
    EVERY,
    GREEDY,
    SUFFIX,
    TREES,
    Switching,
    check_all,
    finish,
    group,
    letters,
    make_engine,
    prompts,
    reference,
    ticking,
)
from tests.services.rollout.test_sampling import FILTERED, PLAIN, PROMPT, SMALL, exact_law, p_value, score

NAME = lambda s: getattr(s, "name", str(s))  # noqa: E731
MODEL = tiny_model("qwen3", 64, 0, 2.0)
DRAFTER = random_drafter(spec_of(MODEL))


def continuing(works: list[GroupWork], partials: tuple[PartialRollout, ...]) -> list[GroupWork]:
    """The work of the rollouts that were withdrawn."""
    found = []
    for work in works:
        mine = tuple(p for p in partials if p.group_id == work.group_id)
        if mine:
            found.append(replace(work.subset({p.index for p in mine}), partials=mine))
    return found


def moved(
    source: NativeEngine, destination: NativeEngine, works: list[GroupWork], rounds: int, ids: set[str] | None = None
) -> tuple[dict[str, Rollout], tuple[PartialRollout, ...]]:
    """Run `rounds` rounds, move `ids` (all), run both to the end: every rollout comes once."""
    source.submit(works)
    found = {r.rollout_id: r for _ in range(rounds) for r in source.step()}
    everything = {f"{w.group_id}#{i}" for w in works for i in w.indices}
    out = source.withdraw(everything if ids is None else ids)
    assert not out.finished and not found.keys() & {p.rollout_id for p in out.partials}
    for engine, more in ((source, []), (destination, continuing(works, out.partials))):
        rest = finish(engine, more)
        assert not rest.keys() & found.keys(), "a rollout came twice"
        found |= rest
    assert found.keys() == everything
    return found, out.partials


# -- greedy


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(EVERY), st.sampled_from(EVERY), st.integers(0, 18), st.integers(0, 1000),
    st.sets(st.integers(0, 8)), st.integers(3, 9),
)  # fmt: skip
def test_greedy_is_plain_decoding_wherever_it_is_cut(
    before: DraftStrategy, after: DraftStrategy, rounds: int, seed: int, which: set[int], rows: int
) -> None:
    """Ragged groups, more than the rows hold, some moved and some not, another strategy over there."""
    works = [
        group(ids, 1 + n % 3, SamplingParams(temperature=0.0, max_tokens=(16, 3, 11, 7)[n]))
        for n, ids in enumerate(prompts(64, 4, seed, shortest=1))
    ]
    everything = [f"{w.group_id}#{i}" for w in works for i in w.indices]
    ids = {everything[i % len(everything)] for i in which}
    source = make_engine(MODEL, before, DRAFTER, rows=rows)
    destination = make_engine(MODEL, after, DRAFTER, rows=rows)
    found, partials = moved(source, destination, works, rounds, ids)
    check_all(MODEL, found, f"{before.name} {after.name} after {rounds}")
    for w in works:
        for i in w.indices:
            r = found[f"{w.group_id}#{i}"]
            assert len(r.response_ids) == w.sampling.max_tokens and r.finish_reason is FinishReason.LENGTH
    for p in partials:
        r = found[p.rollout_id]
        assert r.response_ids[: len(p.response_ids)] == p.response_ids
        assert r.started_s == p.started_s and r.policy_versions == (0,) == r.drafter_versions
        strategies = {before.name, after.name} if p.response_ids else {after.name}
        assert r.acceptance.steps_by_strategy.keys() <= strategies | {OFF.name}


@pytest.mark.parametrize("s", [OFF, CHAINS[2], TREES[1], SUFFIX[1]], ids=NAME)
def test_every_cut_point_and_back_again(s: DraftStrategy) -> None:
    """Moved away and back after every round: to the token what plain decoding says."""
    ids = prompts(64, 1, 5)[0]
    engines = [make_engine(MODEL, s, DRAFTER), make_engine(MODEL, s, DRAFTER)]
    work = group(ids, 2, SamplingParams(temperature=0.0, max_tokens=20))
    found: list[Rollout] = []
    todo = [work]
    for turn in range(50):
        engine = engines[turn % 2]
        engine.submit(todo)
        found += engine.step()
        todo = continuing([work], engine.withdraw({f"{work.group_id}#{i}" for i in (0, 1)}).partials)
        if not todo:
            break
    assert len(found) == 2 and all(e.num_running == 0 == e.num_tokens for e in engines)
    check_all(MODEL, {r.rollout_id: r for r in found})
    assert all(len(r.response_ids) == 20 for r in found)


def test_those_that_stay_are_not_disturbed_and_seeds_stay_with_their_rows() -> None:
    p = SamplingParams(max_tokens=14)
    works = [group(ids, 2, p, first_seed=40 * n, name=f"g{n}") for n, ids in enumerate(prompts(64, 4, seed=6))]
    together = finish(make_engine(MODEL), works)
    out = {"g0#0", "g2#1", "g3#0"}
    found, partials = moved(make_engine(MODEL), make_engine(MODEL), works, 5, out)
    assert {q.rollout_id for q in partials} == out
    for key, r in found.items():
        known = 5 if key in out else 14
        assert r.response_ids[:known] == together[key].response_ids[:known]


def test_a_drafter_is_accepted_after_a_move_as_before() -> None:
    """Its state is rebuilt over all tokens, not only over those that come: a perfect one stays perfect."""
    model = markov_model("llama", 40, 3, 2.0)
    s, p = CHAINS[2], SamplingParams(temperature=0.0, max_tokens=24)
    engines = [make_engine(model, s, perfect_drafter(spec_of(model))) for _ in range(2)]
    found, _ = moved(*engines, [group((5, 9, 3), 2, p)], 3)
    for r in found.values():
        assert r.acceptance.histogram == (0, 0, 0, 6) and r.acceptance.acceptance_length == 4.0
        assert r.acceptance.proposed == 18 and r.acceptance.steps_by_strategy == {s.name: 6}


def test_the_suffix_index_over_there_learns_what_was_said() -> None:
    index = SuffixIndex(10_000)
    found, partials = moved(make_engine(MODEL), make_engine(MODEL, SUFFIX[0], index=index), [group((1, 2, 3), 1)], 6)
    (r,) = found.values()
    assert len(partials[0].response_ids) == 6 and index.num_tokens == 3 + len(r.response_ids)


# -- stops


@pytest.mark.parametrize("rounds", range(1, 6))
@pytest.mark.parametrize("s", [OFF, SUFFIX[0]], ids=NAME)
def test_a_stop_string_may_straddle_the_cut(s: DraftStrategy, rounds: int) -> None:
    plain, _ = reference(MODEL, (1, 7, 9, 4), 8)
    stop = letters(plain[2:6])
    p = SamplingParams(temperature=0.0, max_tokens=8, stop_strings=(stop,))
    found, partials = moved(make_engine(MODEL, s), make_engine(MODEL, s), [group((1, 7, 9, 4), 1, p)], rounds)
    (r,) = found.values()
    assert s is not OFF or len(partials[0].response_ids) == rounds
    assert list(r.response_ids) == plain[:6] and r.finish_reason is FinishReason.STOP
    assert r.text == letters(plain[:2])


def test_the_budget_counts_the_whole_response() -> None:
    for rounds in range(1, 8):
        works = [group((1, 7, 9, 4), 1, SamplingParams(max_tokens=8), first_seed=3)]
        (r,) = moved(make_engine(MODEL), make_engine(MODEL), works, rounds)[0].values()
        assert len(r.response_ids) == 8 == len(r.rollout_logprobs) and r.finish_reason is FinishReason.LENGTH


# -- at temperature: laws, logprobs, random numbers

RUNS = 2048


def law_after_moves(s: DraftStrategy | str, p: SamplingParams, rounds: int) -> tuple[float, int]:
    """p-value of moved responses against the exact law, and how many had tokens when they moved."""
    model = tiny_model("qwen3", SMALL, 4, 0.6)
    drafter = random_drafter(spec_of(model))
    selector = [Switching(EVERY, seed=3 + n) if isinstance(s, str) else s for n in (0, 1)]
    engines = [make_engine(model, selector[n], drafter, rows=256, max_len=16) for n in (0, 1)]
    counts: Counter[tuple[int, ...]] = Counter()
    begun = 0
    for n in range(RUNS // 256):
        works = [group(PROMPT, 64, p, first_seed=64 * (4 * n + k), name=f"w{n}.{k}") for k in range(4)]
        found, partials = moved(*engines, works, rounds)
        counts.update(r.response_ids for r in found.values())
        begun += sum(bool(q.response_ids) for q in partials)
    return p_value(counts, exact_law(model, p)), begun


LAWS = [(s, PLAIN) for s in (OFF, CHAINS[0], CHAINS[2], CHAINS[3], TREES[1], SUFFIX[1], "switching")]


@pytest.mark.parametrize(("s", "p"), [*LAWS, ("switching", FILTERED)], ids=NAME)
def test_moved_responses_have_the_targets_law(s: DraftStrategy | str, p: SamplingParams) -> None:
    value, begun = law_after_moves(s, p, 1)
    assert value > 1e-4
    assert begun > 100, "hardly a response was under way: the test shows nothing"


def test_moved_twice_they_have_the_targets_law() -> None:
    model = tiny_model("qwen3", SMALL, 4, 0.6)
    engines = [make_engine(model, OFF, rows=256, max_len=16) for _ in range(3)]
    counts: Counter[tuple[int, ...]] = Counter()
    for n in range(RUNS // 256):
        works = [group(PROMPT, 256, PLAIN, first_seed=256 * n, name=f"w{n}")]
        everything = {f"w{n}#{i}" for i in range(256)}
        engines[0].submit(works)
        for a, b in pairwise(engines):
            counts.update(r.response_ids for r in a.step())
            b.submit(continuing(works, a.withdraw(everything).partials))
        counts.update(r.response_ids for r in finish(engines[2]).values())
    assert counts.total() == RUNS and p_value(counts, exact_law(model, PLAIN)) > 1e-4


def test_the_chi_square_catches_numbers_that_are_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest with the seed it began with: the second token follows the first one's number."""
    monkeypatch.setattr("services.rollout.native.continued_seed", lambda seed, num_tokens: seed)
    assert law_after_moves(OFF, PLAIN, 1)[0] < 1e-6


def test_continued_seeds_are_their_own() -> None:
    seeds = {continued_seed(seed, n) for seed in range(-50, 50) for n in range(60)}
    assert len(seeds) == 100 * 60 and continued_seed(7, 0) == 7
    assert continued_seed(7, 3) == continued_seed(7, 3) < 2**48


@pytest.mark.parametrize("s", [OFF, CHAINS[2], TREES[1]], ids=NAME)
def test_logprobs_are_the_models_before_and_after_the_cut(s: DraftStrategy) -> None:
    p = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=14)
    engines = [make_engine(MODEL, s, DRAFTER) for _ in range(2)]
    found, partials = moved(*engines, [group((3, 1, 4), 4, p)], 2)
    assert len(partials) == 4
    for r in found.values():
        again = score(MODEL, r, p)
        assert max(abs(a - b) for a, b in zip(again, r.rollout_logprobs, strict=True)) < 1e-4


def test_versions_are_listed_in_order() -> None:
    engines = [make_engine(MODEL, CHAINS[2], DRAFTER) for _ in range(2)]
    engines[1].load_policy(4, tensors_of(MODEL))
    engines[1].load_drafter(2, DRAFTER)
    found, partials = moved(*engines, [group((3, 1, 4), 2)], 2)
    assert all(q.policy_versions == (0,) == q.drafter_versions for q in partials)
    assert all((r.policy_versions, r.drafter_versions) == ((0, 4), (0, 2)) for r in found.values())


def test_what_waits_is_handed_back_as_it_came() -> None:
    engine = make_engine(MODEL, rows=2)
    first, second = group((1, 2, 3), 2), group((4, 5), 2, first_seed=9)
    engine.submit([first, second])
    engine.step()
    out = engine.withdraw({f"{second.group_id}#1"})
    assert [(q.index, q.response_ids, q.policy_versions) for q in out.partials] == [(1, (), ())]
    assert engine.num_waiting == 1 and engine.num_running == 2
    (again,) = continuing([second], out.partials)
    found = finish(make_engine(MODEL), [again]) | finish(engine)
    check_all(MODEL, found)
    assert found[f"{second.group_id}#1"].policy_versions == (0,)
    assert len(found) == 4


def test_what_cannot_be_continued_is_refused() -> None:
    engine = make_engine(MODEL)
    work = group((1, 2, 3), 1, SamplingParams(max_tokens=3))
    engine.submit([work])
    engine.step()
    (known,) = engine.withdraw({f"{work.group_id}#0"}).partials
    for bad, message in (
        (replace(known, response_ids=(1, 2, 3), rollout_logprobs=(0.0,) * 3), "3 tokens of 3 are there already"),
        (replace(known, response_ids=(64,), rollout_logprobs=(0.0,)), r"ids so far must be in \[0, 64\)"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit([replace(work, partials=(bad,))])
    with pytest.raises(AssertionError):
        replace(known, response_ids=(1, 2))
    for index, group_id in ((1, work.group_id), (0, "other")):
        with pytest.raises(AssertionError):
            replace(work, partials=(replace(known, index=index, group_id=group_id),))


# -- through the server


def serving(rows: int = 8) -> RolloutService:
    service = RolloutService(make_engine(MODEL, OFF, rows=rows), {OFF.name: OFF}, ticking())
    service.open_epoch(1)
    return service


def test_the_servers_reports_count_every_token_once_wherever_it_was_generated() -> None:
    a, b = serving(), serving(rows=2)
    works = [group((1, 5 + n, 9), 2, SamplingParams(temperature=0.0, max_tokens=6 + n)) for n in range(3)]
    a.submit(works, 1)
    reports = [a.advance(0.0, 1) for _ in range(3)]
    assert reports[0].prefill_tokens == 9 and reports[0].prefill_s > 0 and reports[1].prefill_tokens == 0
    out = a.withdraw([f"{works[0].group_id}#0", f"{works[1].group_id}#1", "nobody#0"], 1)
    assert [len(p.response_ids) for p in out] == [3, 3]
    b.submit(continuing(works, out), 1)
    there = [b.advance(0.0, 1)]
    assert there[0].prefill_tokens == 6 + 6 and there[0].new_tokens == 2
    for service, found in ((a, reports), (b, there)):
        while found[-1].running or found[-1].waiting:
            found.append(service.advance(0.0, 1))
    finished = [r for report in (*reports, *there) for r in report.finished]
    assert len(finished) == 6
    assert sum(r.new_tokens for r in (*reports, *there)) == sum(len(r.response_ids) for r in finished)
    check_all(MODEL, {r.rollout_id: r for r in finished})


def test_withdrawing_needs_the_epoch_and_is_not_done_twice() -> None:
    service = serving()
    work = group((1, 2, 3), 1, GREEDY)
    service.submit([work], 1)
    service.advance(0.0, 1)
    with pytest.raises(StaleEpochError):
        service.withdraw([f"{work.group_id}#0"], 0)
    assert len(service.withdraw([f"{work.group_id}#0"], 1)) == 1
    assert service.withdraw([f"{work.group_id}#0"], 1) == ()
    report = service.advance(0.0, 1)
    assert not report.running and not report.finished and report.new_tokens == 0
