"""Where a response ends when several tokens are accepted at once: pure rules, then the same through the engine."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from services.core.types import FinishReason, SamplingParams
from services.rollout.stops import Emission, emit, find_stop, response_text
from services.speculation.suffix_index import SuffixIndex
from tests.services.models.tiny import markov_model, tiny_model
from tests.services.rollout.engines import Scripted, finish, group, letters, make_engine, reference, strategy

STOP = 25
S = FinishReason.STOP
LENGTH = FinishReason.LENGTH


def params(max_tokens: int = 100, ids: tuple[int, ...] = (STOP,), strings: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=ids, stop_strings=strings)


@pytest.mark.parametrize(
    ("cap", "expected"),
    [(5, Emission(3, S)), (3, Emission(3, S)), (2, Emission(2, LENGTH)), (1, Emission(1, LENGTH)), (6, Emission(3, S))],
)
def test_row_1_the_first_stop_wins_over_a_later_cap(cap: int, expected: Emission) -> None:
    """Outputs [10, 11, STOP, 20, 21, 22] accepted at once; a stop past the cap stays "length"."""
    assert emit([], [10, 11, STOP, 20, 21, 22], params(cap), letters) == expected


@pytest.mark.parametrize(("earlier", "cap", "count"), [(0, 1, 1), (0, 4, 4), (0, 9, 5), (60, 64, 4), (63, 64, 1)])
def test_row_6_exactly_the_budget_or_the_accepted_run(earlier: int, cap: int, count: int) -> None:
    found = emit([1] * earlier, [1, 2, 3, 4, 5], params(cap), letters)
    assert found == Emission(count, LENGTH if earlier + count == cap else None)


def test_row_4_a_stop_string_before_the_stop_id_in_one_run() -> None:
    sampling = params(strings=("cd",))
    assert emit([0], [1, 2, 3, STOP, 7], sampling, letters) == Emission(3, S)
    assert response_text([0, 1, 2, 3], sampling, letters) == "ab"


def test_row_4_the_stop_id_first_hides_a_later_string() -> None:
    sampling = params(strings=("cd",))
    assert emit([0], [1, STOP, 2, 3], sampling, letters) == Emission(2, S)
    assert response_text([0, 1, STOP], sampling, letters) == "ab" + letters([STOP])


def test_stop_strings_span_tokens_and_steps() -> None:
    sampling = params(strings=("abc", "zz"))
    assert emit([0, 1], [2, 5], sampling, letters) == Emission(1, S)
    assert emit([0, 1], [3, 5], sampling, letters) == Emission(2, None)
    assert response_text([5, 0, 1, 2], sampling, letters) == "f"


def test_overlapping_strings_cut_at_the_earliest() -> None:
    assert find_stop("xxabcyy", ("cy", "bc", "abc")) == 2
    assert find_stop("xx", ("a",)) is None and find_stop("", ()) is None


def test_the_budget_hides_a_stop_string_beyond_it() -> None:
    assert emit([], [0, 1, 2, 3], params(2, strings=("cd",)), letters) == Emission(2, LENGTH)
    assert emit([], [0, 1, 2, 3], params(4, strings=("cd",)), letters) == Emission(4, S)


def test_a_finished_response_is_not_stepped_again() -> None:
    with pytest.raises(AssertionError):
        emit([1, 2], [3], params(2), letters)


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(TOKENS, st.lists(st.integers(1, 5), min_size=1), st.integers(1, 12), st.sampled_from([(), (3,), (2, 3)]),
       st.sampled_from([(), ("ab",), ("aa", "ba"), ("cab",)]))  # fmt: skip
def test_rows_1_4_6_however_the_run_is_cut_into_steps(
    tokens: list[int], cuts: list[int], cap: int, ids: tuple[int, ...], strings: tuple[str, ...]
) -> None:
    """Accepting k tokens at once ends the response exactly where one token at a time would."""
    sampling = params(cap, ids, strings)

    def walk(sizes: list[int]) -> tuple[list[int], FinishReason | None]:
        said: list[int] = []
        at = 0
        for size in [*sizes, *[1] * len(tokens)]:
            if not (new := tokens[at : at + size]):
                break
            found = emit(said, new, sampling, letters)
            said += new[: found.count]
            if found.finish_reason is not None:
                return said, found.finish_reason
            assert found.count == len(new)
            at += len(new)
        return said, None

    said, reason = walk(cuts)
    assert (said, reason) == walk([])
    assert len(said) <= cap and (reason is LENGTH) <= (len(said) == cap)
    if reason is S:
        text = letters(said)
        assert said[-1] in ids or any(text.endswith(s) for s in strings)


# -- multi-byte characters


def byte_decode():
    """Byte-level tokens: every character beyond ASCII is split over several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return (lambda text: core.encode(text).ids), (lambda ids: core.decode(list(ids)))


def test_row_22_a_stop_string_of_split_characters() -> None:
    encode, decode = byte_decode()
    ids = encode("A 世界。end")
    sampling = params(ids=(), strings=("界",))
    for size in (1, 2, 3, len(ids)):
        said: list[int] = []
        for at in range(0, len(ids), size):
            found = emit(said, ids[at : at + size], sampling, decode)
            said += ids[at : at + found.count] if found.count < size else ids[at : at + size]
            if found.finish_reason:
                break
        assert decode(said) == "A 世界" and found.finish_reason is S
        assert response_text(said, sampling, decode) == "A 世"


def test_row_22_the_text_is_the_decoding_of_all_ids_through_the_engine() -> None:
    """A model that says one sentence byte by byte, drafted right: characters are split over accepted runs, too."""
    encode, decode = byte_decode()
    sentence = encode("é😀世A ")
    assert len(set(sentence)) == len(sentence) > 10
    model = deepcopy(markov_model("llama", 256, 0))
    model.lm_head.weight.zero_()
    for this, following in zip(sentence, sentence[1:] + sentence[:1], strict=True):
        model.lm_head.weight[following] = model.model.embed_tokens.weight[this]
    engine = make_engine(model, strategy("suffix", 6), index=SuffixIndex(1000), decode=decode)
    work = group((sentence[0], sentence[1]), 1, SamplingParams(temperature=0.0, max_tokens=2 * len(sentence) - 2))
    (r,) = finish(engine, [work]).values()
    assert r.text == decode(r.response_ids) == "😀世A é😀世A "
    assert "�" in "".join(decode([i]) for i in r.response_ids)
    assert r.acceptance.num_accepted_tokens > 4


# -- the same through the engine, with everything accepted at once


def accepted_at_once(sampling: SamplingParams, depth: int = 8):
    model = tiny_model("qwen3", 26, 1, 2.0)
    ids = (1, 2, 3)
    path = reference(model, ids, 24)[0]
    engine = make_engine(model, strategy("suffix", depth), index=Scripted(lambda t, d: path[len(t) - 3 :][:d]))
    (r,) = finish(engine, [group(ids, 1, sampling)]).values()
    assert list(r.response_ids) == path[: len(r.response_ids)]
    assert len(r.rollout_logprobs) == len(r.response_ids)  # row 10: nothing is scored that is not emitted
    emitted_by_steps = r.acceptance.num_accepted_tokens + sum(r.acceptance.steps_by_strategy.values())
    assert emitted_by_steps == len(r.response_ids)  # row 5: counters stop where the tokens stop
    assert r.acceptance.acceptance_rate is None or 0 <= r.acceptance.acceptance_rate <= 1
    return path, r


def first_new(path: list[int], least: int) -> int:
    """The first place >= least whose token did not occur before."""
    return next(n for n in range(least, len(path)) if path[n] not in path[:n])


@pytest.mark.parametrize("budget", range(1, 13))
def test_row_6_exactly_max_tokens_when_all_is_accepted(budget: int) -> None:
    _, r = accepted_at_once(SamplingParams(temperature=0.0, max_tokens=budget))
    assert len(r.response_ids) == budget and r.finish_reason is LENGTH


@pytest.mark.parametrize("more", [0, 1, 3])
def test_row_1_nothing_after_the_stop_leaks(more: int) -> None:
    path, _ = accepted_at_once(SamplingParams(temperature=0.0, max_tokens=9))
    at = first_new(path, 2)
    sampling = SamplingParams(temperature=0.0, max_tokens=at + 1 + more, stop_token_ids=(path[at],))
    _, r = accepted_at_once(sampling)
    assert len(r.response_ids) == at + 1 and r.finish_reason is S
    _, short = accepted_at_once(SamplingParams(temperature=0.0, max_tokens=at, stop_token_ids=(path[at],)))
    assert len(short.response_ids) == at and short.finish_reason is LENGTH


def test_row_4_the_text_ends_before_the_stop_string() -> None:
    path, _ = accepted_at_once(SamplingParams(temperature=0.0, max_tokens=9))
    at = first_new(path, 3)
    string = letters(path[at - 1 : at + 1])
    end = path[first_new(path, at + 1)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(end,), stop_strings=(string,))
    _, r = accepted_at_once(sampling)
    assert len(r.response_ids) == at + 1 and r.finish_reason is S and r.text == letters(path[: at - 1])


def test_several_stop_ids() -> None:
    path, _ = accepted_at_once(SamplingParams(temperature=0.0, max_tokens=9))
    first, second = first_new(path, 1), first_new(path, first_new(path, 1) + 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(path[second], path[first]))
    assert len(accepted_at_once(sampling)[1].response_ids) == first + 1
