"""The load of `longtail bench serve` and what is made of it."""

from __future__ import annotations

import math
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench_serve import WINDOWS, Side, _figures, _windows, table
from deploy.steady_load import Answered, Arrival, arrivals, ask, load, quantile, scrape, sum_prompt
from tests.deploy.serving_app import OFF, arguments, served_here

pytestmark = pytest.mark.timeout(400)


def test_the_same_seed_is_the_same_load_at_the_wanted_rate() -> None:
    found = list(arrivals(5.0, 400.0, 3))
    assert found == list(arrivals(5.0, 400.0, 3)) != list(arrivals(5.0, 400.0, 4))
    assert all(a.at_s < b.at_s < 400 for a, b in pairwise(found))
    assert abs(len(found) / 2000 - 1) < 5 / math.sqrt(2000)
    assert all(re.fullmatch(r"\d{1,2}(\+\d{1,2}){1,4}=", a.prompt) for a in found)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_the_least_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) - 1e-9
    assert sum(v < found for v in values) < share * len(values) + 1e-9
    assert math.isnan(quantile([], share))


def test_a_real_server_is_asked_as_planned() -> None:
    looks: list[float] = []
    plan = [Arrival(0.05 * n, sum_prompt(random.Random(n))) for n in range(12)]
    with served_here(arguments(OFF)) as made:
        url = f"{made.url}/v1"
        found = load(url, "pocket", plan, 0.2, looks.append, max_tokens=8, temperature=0)
        told = scrape(url)
        refused = ask(url, "another", "1+1=", 0.0)
    assert [a.at_s for a in found] == [a.at_s for a in plan] and {a.code for a in found} == {200}
    assert all(0 < a.tokens <= 8 and a.seconds > 0 and a.made_by == "policy-0-drafter-none" for a in found)
    assert told["generated_tokens_total"] == sum(a.tokens for a in found)
    assert told["requests_total/200"] == 12 and len(looks) >= 3 and looks == sorted(looks)
    assert refused.code == 404
    assert ask(url, "pocket", "1+1=", 0.0).code == 0, "nobody is there any more"


def side(name: str, seconds: float, growing: float) -> Side:
    """Acceptance grows by `growing` from look to look; request k takes `seconds` and k milliseconds."""
    answers = tuple(Answered(float(k), seconds + k / 1000, 200 if k != 7 else 503, 10, "", name) for k in range(30))
    told, totals = [], {"verify_steps_total": 0.0, "accepted_tokens_total": 0.0}
    for k in range(WINDOWS + 1):
        told.append({**totals, "learn_micro_steps_total": 5.0 * k})
        totals = {"verify_steps_total": 100.0 * (k + 1), "accepted_tokens_total": totals["accepted_tokens_total"]
                  + 100 * growing * k}  # fmt: skip
    return Side(answers, tuple(told), ("a", "b"))


def test_what_is_made_of_it() -> None:
    found = _figures([side("x", 0.1, 0.1), side("y", 0.3, 0.2)], ("a", "c"))
    assert (found["requests"], found["failed"], found["greedy_differ"]) == (60, 2, 2)
    assert found["latency_s"]["p50"] == pytest.approx(0.129) and found["latency_s"]["max"] == pytest.approx(0.329)
    assert found["latency_first_third_s"]["max"] == pytest.approx(0.309)
    for windows, grown in zip(found["acceptance_length"], (0.1, 0.2), strict=True):
        assert windows == pytest.approx([1 + grown * k for k in range(WINDOWS)], abs=1e-3)
    assert found["micro_steps"] == [30, 30] and found["versions"] == [1, 1]
    lines = table({"off": found, "learning": found}).splitlines()
    assert lines[0].split() == ["off", "learning"] and lines[-1].startswith("acceptance length, last part")


@given(st.integers(2, 40))
def test_windows_follow_each_other_from_the_first_look_to_the_last(count: int) -> None:
    told = [{"n": float(n)} for n in range(count)]
    found = _windows(told)
    assert found[0][0] == told[0] and found[-1][1] == told[-1] and len(found) <= WINDOWS
    assert all(a[1] == b[0] for a, b in pairwise(found))
