"""Problems from reasoning-gym, by task name and parameters, with an optional long tail in their number of terms."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from random import Random
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset

from services.config.schema import ReasoningGymData
from services.core.errors import DataError
from services.data.prompts import Problem

# A set of `size` distinct problems is given up after this many draws per problem without reaching it.
DRAWS_PER_PROBLEM = 50


def known_tasks() -> frozenset[str]:
    """Names that reasoning-gym can score."""
    return frozenset(DATASETS)


def generate_problems(source: ReasoningGymData, seed: int) -> tuple[Problem, ...]:
    """`source.size` distinct problems, the same for the same source and seed.

    Raises DataError: unknown task or parameter, template key the task lacks, or fewer distinct problems than asked.
    """
    entries = _skewed_entries(source, seed) if source.terms else _plain_entries(source, seed)
    found: dict[str, Problem] = {}
    for _ in range(DRAWS_PER_PROBLEM * source.size):
        problem = _problem(source, next(entries))
        found.setdefault(problem.id, problem)
        if len(found) == source.size:
            return tuple(found.values())
    raise DataError(
        f"reasoning-gym task '{source.task}' gave only {len(found)} distinct problems of the {source.size} asked: "
        "lower data.source.size or widen data.source.params"
    )


def num_terms(terms: ReasoningGymData.SkewedTerms, rng: Random) -> int:
    """A clipped log-normal draw: half of the problems are at or below the median, a few are many times as long."""
    drawn = round(math.exp(rng.gauss(math.log(terms.median), terms.sigma)))
    return min(max(drawn, terms.min), terms.max)


def _skewed_entries(source: ReasoningGymData, seed: int) -> Iterator[dict[str, Any]]:
    """One reasoning-gym data set per number of terms; each draw picks the set, then takes its next entry."""
    terms = source.terms
    assert terms is not None
    _check_terms(source)
    rng = Random(f"{seed}/terms")
    sets: dict[int, Iterator[dict[str, Any]]] = {}
    while True:
        count = num_terms(terms, rng)
        if count not in sets:
            sets[count] = _stream(source, f"{seed}/{count}", {"min_terms": count, "max_terms": count})
        yield next(sets[count])


def _plain_entries(source: ReasoningGymData, seed: int) -> Iterator[dict[str, Any]]:
    return _stream(source, f"{seed}/all", {})


def _stream(source: ReasoningGymData, seed: str, extra: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Entries without end. reasoning-gym seeds entry i with seed + i, so streams start from hashes, far apart."""
    part = 0
    while True:
        digest = hashlib.sha256(f"{seed}/{part}".encode()).digest()
        dataset = _dataset(source, int.from_bytes(digest[:6], "big"), extra)
        yield from (dataset[i] for i in range(source.size))
        part += 1


def _dataset(source: ReasoningGymData, seed: int, extra: dict[str, int]) -> ProceduralDataset:
    if source.task not in DATASETS:
        raise DataError(
            f"no reasoning-gym task is called '{source.task}': data.source.task is one of {sorted(DATASETS)}"
        )
    unknown = sorted(set(source.params) - _parameters(source.task))
    if unknown:
        raise DataError(
            f"reasoning-gym task '{source.task}' has no parameter {', '.join(unknown)}: "
            f"data.source.params may hold {sorted(_parameters(source.task))}"
        )
    try:
        return create_dataset(source.task, seed=seed, size=source.size, **{**source.params, **extra})
    except (AssertionError, TypeError, ValueError) as error:  # reasoning-gym validates with assert
        given = {**source.params, **extra}
        raise DataError(f"reasoning-gym task '{source.task}' refuses data.source.params {given}: {error}") from error


def _parameters(task: str) -> set[str]:
    """Parameters a user may set; seed and size have their own keys."""
    config = DATASETS[task][1]
    assert is_dataclass(config)
    return {f.name for f in fields(config)} - {"seed", "size"}


def _check_terms(source: ReasoningGymData) -> None:
    limits = {"min_terms", "max_terms"}
    if source.task in DATASETS and not limits <= _parameters(source.task):
        usable = sorted(name for name in DATASETS if limits <= _parameters(name))
        raise DataError(
            f"reasoning-gym task '{source.task}' has no number of terms: leave data.source.terms out, "
            f"or use one of {usable}"
        )
    if limits & set(source.params):
        raise DataError("data.source.terms sets the number of terms: leave min_terms and max_terms out of params")


def _problem(source: ReasoningGymData, entry: dict[str, Any]) -> Problem:
    """`meta` is the task's metadata plus the original question: all that the task's own scorer looks at."""
    question, metadata = entry["question"], entry["metadata"]
    keys = {**metadata, "question": question}
    try:
        text = source.template.format(**keys)
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        raise DataError(
            f"data.source.template {source.template!r} does not fit task '{source.task}' ({error!r}): "
            f"use {{question}} or a key of {sorted(keys)}"
        ) from error
    answer = entry["answer"]  # None where any valid solution is accepted, e.g. graph colouring
    return Problem(text, "" if answer is None else str(answer), source.task, {"question": question, **metadata})
