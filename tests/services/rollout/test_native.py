"""Requests of the native engine: what is refused, who is admitted when, abort, and what a rollout records."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import RequestError
from services.core.types import GroupWork, Prompt, SamplingParams
from services.speculation.strategy import OFF
from services.speculation.suffix_index import SuffixIndex
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
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
    make_engine,
    prompts,
)

MODEL = tiny_model("qwen3", 32, 0, 2.0)


def engine(selector=OFF, **options):
    return make_engine(MODEL, selector, random_drafter(spec_of(MODEL)), **options)


def sampling(**change: object) -> SamplingParams:
    return replace(GREEDY, **change)  # type: ignore[arg-type]


# -- refused


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (group((), 1), "non-empty list of ids"),
        (group((1, 32), 1), r"ids in \[0, 32\)"),
        (group((1, -1, 2), 1), r"ids in \[0, 32\)"),
        (group(tuple([1] * 49), 1), "49 prompt tokens .* max_tokens 16 exceed rollout.engine.max_len 64"),
        (group((1, 2), 1, sampling(max_tokens=63)), "shorten the prompt or raise max_len"),
        (group((1, 2), 9), "9 rollouts exceed rollout.engine.max_running 8"),
        (group((1, 2), 1, sampling(max_tokens=0)), "max_tokens = 0"),
        (group((1, 2), 1, sampling(temperature=-1.0)), "temperature = -1.0"),
        (group((1, 2), 1, sampling(temperature=math.nan)), "temperature = nan"),
        (group((1, 2), 1, sampling(top_p=0.0)), "top_p"),
        (group((1, 2), 1, sampling(top_p=1.5)), "top_p"),
        (group((1, 2), 1, sampling(top_k=-3)), "top_k"),
        (group((1, 2), 1, sampling(min_p=1.0)), "min_p"),
        (group((1, 2), 1, sampling(stop_strings=("",))), "empty string"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_served_is_refused_and_nothing_starts(work: GroupWork, message: str) -> None:
    e = engine()
    e.submit([group((1, 2, 3), 2)])
    with pytest.raises(RequestError, match=message):
        e.submit([group((7, 8), 1), work])
    assert e.num_waiting == 2 and e.num_running == 0
    check_all(MODEL, finish(e))


def test_the_limits_themselves_are_served() -> None:
    found = finish(engine(), [group(tuple([1] * 48), 8), group((0, 31), 1, sampling(max_tokens=62))])
    check_all(MODEL, found)
    assert sorted({len(r.response_ids) for r in found.values()}) == [16, 62]


@pytest.mark.parametrize("s", [*CHAINS, *TREES, *SUFFIX], ids=lambda s: s.name)
def test_drafts_past_the_end_of_the_longest_sequence(s) -> None:
    """The last verify steps of a full row write beyond max_len: into spare columns, not over anything."""
    found = finish(engine(s, rows=3), [group((0, 31), 2, sampling(max_tokens=62)), group((5, 6, 7), 1)])
    check_all(MODEL, found)


def test_a_work_names_each_rollout_once() -> None:
    with pytest.raises(AssertionError):
        GroupWork("g", Prompt("p", "", (1,), "", ""), (0, 0), (1, 2), GREEDY)
    with pytest.raises(AssertionError):
        GroupWork("g", Prompt("p", "", (1,), "", ""), (), (), GREEDY)


# -- admission


def test_a_group_waits_until_it_fits_and_is_never_split() -> None:
    e = engine(rows=5)
    first = [group((1, 2), 4, sampling(max_tokens=3), name="a"), group((3, 4), 3, sampling(max_tokens=2), name="b")]
    e.submit(first)
    e.submit([group((5, 6), 1, sampling(max_tokens=2), name="c")])
    running = []
    while e.num_running or e.num_waiting:
        e.step()
        running.append({r.rollout_id[0] for r in e.running()})
    # c would fit beside a, but does not overtake b
    assert running == [{"a"}, {"a"}, set(), {"b", "c"}, set()]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=8), st.integers(0, 99))
def test_any_mix_of_groups_is_served_whole_and_in_order(groups: list[tuple[int, int]], seed: int) -> None:
    e, rng = engine(Switching(EVERY, seed), rows=6), random.Random(seed)
    works = [
        group(ids, count, SamplingParams(max_tokens=budget), name=f"{n:02d}")
        for n, (ids, (count, budget)) in enumerate(zip(prompts(32, len(groups), seed), groups, strict=True))
    ]
    pending, started, found = list(works), [], {}
    for _ in range(400):
        while pending and rng.random() < 0.5:
            e.submit([pending.pop(0)])
        found |= {r.rollout_id: r for r in e.step()}
        assert e.num_running <= 6
        ids = [r.rollout_id for r in e.running()]
        assert len(set(ids)) == len(ids) and not set(ids) & found.keys()
        started += [g for g in sorted({i[:2] for i in ids}) if g not in started]
        for g in {i[:2] for i in ids}:
            whole = len(next(w for w in works if w.group_id == g).indices)
            assert sum(i[:2] == g for i in [*ids, *found]) == whole, "a group was split"
        if not (pending or e.num_running or e.num_waiting):
            break
    assert found.keys() == {f"{w.group_id}#{i}" for w in works for i in w.indices}
    assert started == sorted(started)


def test_a_redispatch_carries_the_missing_indices_only() -> None:
    p = SamplingParams(max_tokens=10)
    whole = finish(engine(), [group((1, 2, 3), 4, p, first_seed=50, name="g")])
    part = GroupWork("g", group((1, 2, 3)).prompt, (1, 3), (51, 53), p)
    again = finish(engine(), [part])
    assert again.keys() == {"g#1", "g#3"}
    assert all(again[k].response_ids == whole[k].response_ids and again[k].index == whole[k].index for k in again)


def test_nothing_to_do_is_a_round_of_nothing() -> None:
    e = engine()
    assert e.step() == [] and e.running() == () and e.num_waiting == 0


# -- abort


@pytest.mark.parametrize("s", [OFF, CHAINS[2], TREES[1], SUFFIX[1]], ids=lambda s: s.name)
def test_abort_drops_everything_and_leaves_no_trace(s) -> None:
    e = engine(s, rows=4)
    works = [group(ids, 3, sampling(max_tokens=20), name=f"g{n}") for n, ids in enumerate(prompts(32, 3, seed=2))]
    e.submit(works)
    for _ in range(3):
        e.step()
    assert sorted(e.abort()) == sorted(f"g{n}#{i}" for n in range(3) for i in range(3))
    assert (e.num_running, e.num_waiting, e.running(), e.abort()) == (0, 0, (), ())
    check_all(MODEL, finish(e, works))
    sampled = [group((4, 5, 6), 4, SamplingParams(max_tokens=12), first_seed=3)]
    fresh = finish(engine(s, rows=4, index=SuffixIndex(1000)), sampled)
    if s is OFF:
        for key, r in finish(e, sampled).items():
            assert r.response_ids == fresh[key].response_ids


# -- what a rollout records


def test_a_rollout_records_where_it_came_from() -> None:
    e = engine(CHAINS[2])
    e.load_policy(4, tensors_of(MODEL))
    work = group((1, 2, 3), 2, SamplingParams(max_tokens=5), first_seed=70, name="g")
    for key, r in finish(e, [work]).items():
        assert key == r.rollout_id == f"g#{r.index}" and r.group_id == "g" and r.prompt_id == work.prompt.id
        assert r.prompt_ids == (1, 2, 3) and r.seed == 70 + r.index and r.sampling == work.sampling
        assert r.policy_versions == (4,) and r.drafter_versions == (0,) and r.server == "rollout-0"
        assert r.finished_s > r.started_s >= 0
        assert r.text == "".join(chr(97 + i) for i in r.response_ids)


@pytest.mark.parametrize("s", [*CHAINS, *TREES, *SUFFIX], ids=lambda s: s.name)
def test_rows_5_and_9_the_accounting_adds_up(s) -> None:
    works = [
        group(ids, 2, SamplingParams(max_tokens=9, stop_token_ids=(7, 8)), first_seed=n)
        for n, ids in enumerate(prompts(32, 6, seed=3))
    ]
    for r in finish(engine(s), works).values():
        a = r.acceptance
        steps = sum(a.steps_by_strategy.values())
        assert steps + a.num_accepted_tokens == len(r.response_ids) == len(r.rollout_logprobs)
        assert a.verify_steps == a.steps_by_strategy.get(s.name, 0)
        assert a.proposed <= a.verify_steps * (s.num_draft_tokens - 1)
        assert a.acceptance_rate is None or 0 <= a.acceptance_rate <= 1
        assert len(a.histogram) <= s.depth + 1


def test_a_stop_on_the_last_token_of_the_budget_is_a_stop() -> None:
    e = engine()
    ids = prompts(32, 1)[0]
    path = next(iter(finish(e, [group(ids)]).values())).response_ids
    at = next(n for n in range(2, 16) if path[n] not in path[:n])
    (r,) = finish(e, [group(ids, 1, sampling(max_tokens=at + 1, stop_token_ids=(path[at],)))]).values()
    assert r.finish_reason == "stop" and r.response_ids == path[: at + 1]
