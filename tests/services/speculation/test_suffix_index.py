from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.speculation.suffix_index import Follower, SuffixIndex, confidence

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def filled(max_tokens: int = 1000, **sequences: list[int]) -> SuffixIndex:
    index = SuffixIndex(max_tokens)
    for key, tokens in sequences.items():
        index.observe(key, tokens, 0)
    return index


def said_by(index: SuffixIndex, key: str, tail: list[int], most: int) -> list[int]:
    return [f.token for f in index.propose(key, tail, most)]


def test_a_known_response_is_proposed_to_its_end() -> None:
    index = filled(p=[1, 2, 3, 4, 5, 6, 7])
    assert said_by(index, "p", [9, 9, 2, 3], 3) == [4, 5, 6]
    assert said_by(index, "p", [2, 3], 10) == [4, 5, 6, 7]
    assert (
        said_by(index, "p", [6, 7], 4) == [] and said_by(index, "p", [3], 4) == [] and said_by(index, "p", [], 4) == []
    )


def test_the_longest_context_decides_then_the_most_frequent() -> None:
    index = SuffixIndex(1000)
    for tokens in ([1, 5, 6, 7], [2, 5, 6, 8], [3, 5, 6, 8]):
        index.observe("p", tokens, 0)
    assert said_by(index, "p", [9, 5, 6], 1) == [8]
    assert said_by(index, "p", [1, 5, 6], 1) == [7]


def test_proposals_never_come_from_other_prompts() -> None:
    index = filled(p=[1, 2, 3, 4], q=[1, 2, 9, 9])
    assert said_by(index, "p", [1, 2], 2) == [3, 4] and said_by(index, "q", [1, 2], 2) == [9, 9]
    assert said_by(index, "unknown", [1, 2], 2) == []


@given(st.dictionaries(st.sampled_from("pqr"), TOKENS, min_size=1), TOKENS, st.integers(1, 9))
def test_every_proposal_was_seen_after_its_context(known: dict[str, list[int]], tail: list[int], depth: int) -> None:
    index = filled(**known)
    for key, tokens in known.items():
        proposed = said_by(index, key, tail, depth)
        assert len(proposed) <= depth
        said = list(tail)
        for token in proposed:
            pairs = {tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)}
            assert (*said[-2:], token) in pairs
            said.append(token)


@given(TOKENS, st.lists(st.integers(1, 5), max_size=20))
def test_feeding_token_by_token_is_feeding_at_once(tokens: list[int], cuts: list[int]) -> None:
    """Sibling responses arrive while they run, a few tokens at a time, with just the context before them."""
    whole, pieces = SuffixIndex(1000), SuffixIndex(1000)
    whole.observe("p", tokens, 0)
    start = 0
    for cut in [*cuts, len(tokens)]:
        end = min(start + cut, len(tokens))
        known = tokens[max(0, start - pieces.max_match) : end]
        pieces.observe("p", known, len(known) - (end - start))
        start = end
    assert whole.num_tokens == pieces.num_tokens == len(tokens)
    for i in range(len(tokens)):
        assert said_by(whole, "p", tokens[: i + 1], 6) == said_by(pieces, "p", tokens[: i + 1], 6)


@given(st.lists(st.tuples(st.sampled_from("pq"), TOKENS, st.booleans()), max_size=12), TOKENS, st.integers(5, 400))
def test_what_was_noted_is_known_when_it_is_asked_for(
    stream: list[tuple[str, list[int], bool]], tail: list[int], bound: int
) -> None:
    """At the same size: what is forgotten is forgotten of both."""
    eager, lazy = SuffixIndex(bound), SuffixIndex(bound)
    for key, tokens, noted in stream:
        eager.observe(key, tokens, 0)
        (lazy.note if noted else lazy.observe)(key, tokens, 0)
        assert lazy.num_tokens == eager.num_tokens
    for key in "pq":
        found, wanted = lazy.propose(key, tail, 1), eager.propose(key, tail, 1)
        assert [f.confidence for f in found] == [f.confidence for f in wanted]
        assert not lazy.catch_up(key), "counted once"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), TOKENS), max_size=30), st.integers(5, 60))
def test_the_bound_holds_after_every_observation(stream: list[tuple[str, list[int]]], bound: int) -> None:
    index = SuffixIndex(bound)
    for key, tokens in stream:
        index.observe(key, tokens, 0)
        assert 0 <= index.num_tokens <= bound


def test_the_least_recently_fed_prompt_goes_first() -> None:
    index = SuffixIndex(12)
    for key in "abc":
        index.observe(key, [1, 2, 3, 4], 0)
    index.observe("a", [1, 2], 0)
    assert said_by(index, "b", [1, 2], 2) == [] and index.num_tokens == 10
    assert said_by(index, "a", [1, 2], 2) == [3, 4] == said_by(index, "c", [1, 2], 2)


def test_one_prompt_alone_is_bounded_too() -> None:
    index = SuffixIndex(20)
    for _ in range(10):
        index.observe("p", [1, 2, 3, 4, 5, 6, 7], 0)
        assert index.num_tokens <= 20
    index.observe("p", list(range(21)), 0)
    assert index.num_tokens == 0 and said_by(index, "p", [1, 2], 2) == []
    index.observe("p", [1, 2, 3], 0)
    assert said_by(index, "p", [1, 2], 2) == [3]


def test_a_forgotten_prompt_leaves_nothing_and_the_others_stay() -> None:
    index = SuffixIndex(100, max_match=3)
    index.observe("a", [1, 2, 3, 4, 5], 0)
    index.observe("b", [1, 2, 7, 8], 0)
    index.forget("a")
    index.forget("never seen")
    assert index.num_tokens == 4 and said_by(index, "a", [2, 3], 2) == []
    assert said_by(index, "b", [1, 2], 2) == [7, 8]
    index.observe("a", [9, 9, 9], 0)
    assert index.num_tokens == 7


# -- confidence


@given(st.integers(1, 8), st.integers(1, 50), st.integers(0, 50))
def test_confidence_grows_with_the_match_and_with_what_was_seen(match: int, count: int, other: int) -> None:
    here = confidence(match, count, count + other)
    assert 0 < here < 1 and here <= count / (count + other)
    assert here < confidence(match + 1, count, count + other)
    assert here < confidence(match, count + 1, count + 1 + other)
    assert here > confidence(match, count, count + other + 1)


def test_each_token_tells_how_often_its_context_went_on_so() -> None:
    index = SuffixIndex(1000, 2, 2)
    for seen in ([1, 2, 3], [1, 2, 3], [1, 2, 4]):
        index.observe("p", seen, 0)
    assert index.propose("p", [1, 2], 1) == [Follower(3, confidence(2, 2, 3))]


@given(TOKENS, TOKENS, st.floats(0, 1), st.floats(0, 1))
def test_a_draft_ends_before_the_token_that_is_hardly_reached(
    known: list[int], tail: list[int], least: float, reach: float
) -> None:
    index = filled(p=known)
    everything, cut = index.propose("p", tail, 9), index.propose("p", tail, 9, least, reach)
    assert cut == everything[: len(cut)]
    reached = [reach * math.prod(f.confidence for f in everything[: n + 1]) for n in range(len(everything))]
    assert len(cut) == sum(r >= least for r in reached), "reach only falls, so the tokens kept are the first ones"
