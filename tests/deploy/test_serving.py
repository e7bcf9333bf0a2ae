"""The official client against the application over the pocket model: real HTTP, a real engine, no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.deploy.serving_app import EAGLE, OFF, WAIT_S, Served, arguments, chunk_texts, served_here, standing, until

pytestmark = pytest.mark.timeout(400)
PROMPTS = [f"{a}+{b}+{c}=" for a, b, c in ((12, 7, 5), (3, 88, 40), (61, 9, 2), (5, 5, 99), (17, 4, 33))]
GREEDY: dict[str, Any] = {"model": "pocket", "max_tokens": 80, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with served_here(arguments(EAGLE)) as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.client()


@pytest.fixture(scope="module")
def plain() -> Iterator[openai.OpenAI]:
    """The same without speculation."""
    with served_here(arguments(OFF)) as made:
        yield made.client()


def test_the_model_is_listed_with_its_versions(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [m.id for m in listed] == ["pocket"]
    assert client.models.retrieve("pocket").to_dict()["versions"] == "policy-0-drafter-0"


def test_greedy_text_is_the_same_with_speculation_and_without(client: openai.OpenAI, plain: openai.OpenAI) -> None:
    found = client.completions.create(prompt=PROMPTS, **GREEDY)
    bare = plain.completions.create(prompt=PROMPTS, **GREEDY)
    assert [c.text for c in found.choices] == [c.text for c in bare.choices]
    assert [c.index for c in found.choices] == list(range(len(PROMPTS)))
    assert found.usage and bare.usage and found.usage.completion_tokens == bare.usage.completion_tokens
    details, none = found.usage.completion_tokens_details, bare.usage.completion_tokens_details
    assert details and none and none.accepted_prediction_tokens == none.rejected_prediction_tokens == 0
    assert details.accepted_prediction_tokens and details.rejected_prediction_tokens
    assert details.accepted_prediction_tokens < found.usage.completion_tokens  # row 5


def test_a_stream_tells_the_same_and_its_usage(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPTS[0], **GREEDY)
    chunks = list(
        client.completions.create(prompt=PROMPTS[0], stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(chunk_texts(chunks)) == whole.choices[0].text and len(chunks) > 3
    assert chunks[-1].choices == [] and chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert {c.system_fingerprint for c in chunks} == {whole.system_fingerprint} == {"policy-0-drafter-0"}
    assert len({c.id for c in chunks}) == 1


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}]
    whole = client.chat.completions.create(model="pocket", messages=messages, temperature=0, logprobs=True)
    same = client.completions.create(prompt=PROMPTS[0], **GREEDY)
    assert whole.choices[0].message.content == same.choices[0].text  # the template only puts the text in
    told = whole.choices[0].logprobs
    assert told and told.content and "".join(t.token for t in told.content) == same.choices[0].text
    chunks = list(client.chat.completions.create(model="pocket", messages=messages, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == same.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_n_and_seed(client: openai.OpenAI) -> None:
    """The strategy is fixed here, so that a seed fixes the answer."""
    ask: dict[str, Any] = {"model": "pocket", "prompt": PROMPTS[1], "max_tokens": 60, "n": 4, "temperature": 1.5}
    texts = [[c.text for c in client.completions.create(seed=s, **ask).choices] for s in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1, "choices of one request draw their own numbers"


def test_logprobs_are_of_the_distribution_that_was_sampled_from(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "pocket", "prompt": PROMPTS[2], "max_tokens": 30, "logprobs": 0}
    choice = client.completions.create(temperature=1.0, seed=3, **ask).choices[0]
    assert choice.logprobs and choice.logprobs.tokens and choice.logprobs.token_logprobs
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(len(choice.text)))  # one character a token
    assert all(p is not None and p <= 0 for p in choice.logprobs.token_logprobs) and min(choice.logprobs.token_logprobs)
    greedy = client.completions.create(temperature=0, **ask).choices[0]
    assert greedy.logprobs and set(greedy.logprobs.token_logprobs or ()) == {0.0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_wherever_it_lies(client: openai.OpenAI, stream: bool) -> None:
    """Whatever lies in the answer is found, also when it spans tokens and lies inside an accepted run (row 4)."""
    text = client.completions.create(prompt=PROMPTS[0], **GREEDY).choices[0].text
    for start in range(len(text) - 3):
        stop = text[start : start + 3]
        made = client.completions.create(prompt=PROMPTS[0], stop=[stop, "~~"], stream=stream, **GREEDY)
        found = "".join(chunk_texts(made)) if stream else made.choices[0].text  # type: ignore[union-attr, arg-type]
        assert found == text[: text.find(stop)]


def test_max_tokens_end_an_answer_by_length(client: openai.OpenAI) -> None:
    for limit in (1, 2, 3):
        made = client.completions.create(model="pocket", prompt=PROMPTS[0], max_tokens=limit, temperature=0)
        assert made.choices[0].finish_reason == "length" and made.usage
        assert made.usage.completion_tokens == limit
    chat = client.chat.completions.create(
        model="pocket", messages=[{"role": "user", "content": PROMPTS[0]}], max_completion_tokens=2, max_tokens=9
    )
    assert chat.usage and chat.usage.completion_tokens == 2


def test_token_ids_in_place_of_a_text(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="1+2=", **GREEDY).choices[0].text
    ids = [1, 16 - 15 + 15, 6, 17, 8]  # <bos>1+2=
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].text == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_work_along(served: Served, stream: bool) -> None:
    engine = served.generator._engine
    body = {"model": "pocket", "prompt": "9+9=", "max_tokens": 200, "temperature": 2.0, "n": 8, "stream": stream,
            "min_p": 0.0, "seed": 1}  # fmt: skip
    with (
        httpx.Client(timeout=0.02 if not stream else 60) as http,
        pytest.raises(httpx.ReadTimeout)
        if not stream
        else http.stream("POST", f"{served.url}/v1/completions", json=body) as answer,
    ):
        if stream:
            next(answer.iter_lines())  # type: ignore[union-attr]
        else:
            http.post(f"{served.url}/v1/completions", json=body)
    until(lambda: engine.num_running + engine.num_waiting == 0, "the engine is free")
    again = served.client().completions.create(prompt=PROMPTS[0], n=8, **GREEDY)
    assert len(again.choices) == 8


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"echo": True}, "echo", "leave it out"),
    ({"foo": 1}, "foo", "Unrecognized request argument"),
    ({"logprobs": 3}, "logprobs", "0"),
    ({"max_tokens": 0}, "max_tokens", "greater"),
    ({"max_tokens": 1000}, "prompt", "shorten the prompt or lower max_tokens"),
    ({"n": 9}, "n", "send several requests"),
    ({"n": "2"}, "n", "integer"),
    ({"temperature": 3}, "temperature", "2"),
    ({"prompt": [999]}, "", "prompt ids"),
    ({"prompt": []}, "prompt", ""),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"stop": [""]}, "stop", "at least 1 character"),
    ({"seed": 2**70}, "seed", "less"),
    ({"tools": [{}]}, "tools", "not served"),
]


@pytest.mark.parametrize(("change", "param", "message"), REFUSED, ids=lambda v: str(v)[:20].encode("ascii", "replace"))
def test_what_is_not_served_is_told(served: Served, change: dict[str, Any], param: str, message: str) -> None:
    import json

    body = json.dumps({"model": "pocket", "prompt": "1+1=", **change}).encode()
    answer = httpx.post(f"{served.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(param) and message in error["message"], error
    assert error["type"] == "invalid_request_error"


def test_neutral_and_ignored_fields_change_nothing(client: openai.OpenAI) -> None:
    made = client.completions.create(prompt=PROMPTS[0], echo=False, best_of=1, presence_penalty=0, user="me",
                                     logit_bias={}, suffix=None, **GREEDY)  # fmt: skip
    assert made.choices[0].text == client.completions.create(prompt=PROMPTS[0], **GREEDY).choices[0].text


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="ask for 'pocket'"):
        client.completions.create(model="gpt", prompt="1+1=")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_a_token_is_asked_for_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGTAIL_TOKEN", "a-token-of-this-test")
    with served_here(arguments(OFF, rows=2, request_s=0.05)) as made:
        with pytest.raises(openai.AuthenticationError, match="Bearer"):
            made.client("wrong").models.list()
        assert (
            httpx.post(f"{made.url}/v1/completions", content=b"no json").status_code == 401
        )  # before the body is read
        assert made.client("a-token-of-this-test").models.list().data
        assert httpx.get(f"{made.url}/health").json() == {"status": "ok"}
        with (
            standing(made.generator),
            pytest.raises(openai.InternalServerError, match="ask for fewer tokens") as slow,
        ):
            made.client("a-token-of-this-test").completions.create(model="pocket", prompt=PROMPTS[1], max_tokens=20)
        assert slow.value.status_code == 504
        until(lambda: made.generator._engine.num_running == 0, "the slow answer is dropped")


def test_too_many_requests_are_told_when_to_come_back() -> None:
    with served_here(arguments(OFF, rows=2, max_waiting=0)) as made, ThreadPoolExecutor(1) as pool:
        ask: dict[str, Any] = {"model": "pocket", "prompt": "9+9=", "max_tokens": 20, "n": 2}
        with standing(made.generator):
            first = pool.submit(made.client().completions.create, **ask)
            until(lambda: made.generator._engine.num_running + made.generator._engine.num_waiting == 2, "both run")
            with pytest.raises(openai.RateLimitError) as refused:
                made.client().completions.create(model="pocket", prompt="1+1=")
            assert int(refused.value.response.headers["retry-after"]) >= 1
        assert len(first.result(WAIT_S).choices) == 2, "the one before is not harmed"
        assert made.client(retries=2).completions.create(model="pocket", prompt="1+1=").choices


def test_a_model_without_a_chat_template_says_so() -> None:
    with (
        served_here(arguments(OFF, rows=2, chat_template=None)) as made,
        pytest.raises(openai.BadRequestError, match="no chat template"),
    ):
        made.client().chat.completions.create(model="pocket", messages=[{"role": "user", "content": "1+1="}])
