"""A served model under a steady load: the same requests at the same moments, whoever serves."""

from __future__ import annotations

import json
import math
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 120.0
CLIENTS = 64


@dataclass(frozen=True)
class Arrival:
    """`at_s` after the beginning."""

    at_s: float
    prompt: str


@dataclass(frozen=True)
class Answered:
    """`code` 0: no answer. `made_by`: its system_fingerprint."""

    at_s: float
    seconds: float
    code: int
    tokens: int = 0
    text: str = ""
    made_by: str = ""


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
    """Sums of two to five terms, at random moments, `rate` a second in the mean."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        yield Arrival(at_s, sum_prompt(rng))


def sum_prompt(rng: random.Random) -> str:
    return "+".join(str(rng.randrange(100)) for _ in range(rng.randint(2, 5))) + "="


def ask(url: str, model: str, prompt: str, at_s: float, **options: Any) -> Answered:
    """A refusal or a broken connection is an outcome, not an error."""
    body = json.dumps({"model": model, "prompt": prompt, **options}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            told = json.load(answer)
    except urllib.error.HTTPError as error:
        return Answered(at_s, time.monotonic() - started, error.code)
    except (OSError, ValueError):
        return Answered(at_s, time.monotonic() - started, 0)
    seconds, choice = time.monotonic() - started, told["choices"][0]
    return Answered(at_s, seconds, 200, told["usage"]["completion_tokens"], choice["text"], told["system_fingerprint"])


def load(
    url: str, model: str, plan: Sequence[Arrival], every_s: float, look: Callable[[float], None], **options: Any
) -> list[Answered]:
    """Ask as planned, however long answers take; `look` is called with the seconds since the beginning, every
    `every_s` and at the end."""
    started, next_look = time.monotonic(), every_s
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = []
        for arrival in plan:
            while (now := time.monotonic() - started) < arrival.at_s:
                if now >= next_look:
                    look(now)
                    next_look += every_s
                    continue
                time.sleep(min(arrival.at_s - now, max(0.0, next_look - now)))
            asked.append(pool.submit(ask, url, model, arrival.prompt, arrival.at_s, **options))
        found = [future.result() for future in asked]
    look(time.monotonic() - started)
    return found


def scrape(url: str) -> dict[str, float]:
    """The metrics of a served model with a single server: name -> value, label values of states and weights behind a
    slash."""
    root = url.removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/metrics", timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            told = [v for k, v in sorted(sample.labels.items()) if k in ("state", "weights", "code", "le")]
            found["/".join([sample.name.removeprefix("longtail_serving_"), *told])] = sample.value
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
