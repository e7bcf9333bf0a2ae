from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from services.config.schema import ClusterConfig
from services.core.errors import DataError
from services.simulator.recorded_acceptance import acceptance_of
from services.simulator.run_record import RecordedRun
from tests.services.simulator.worlds import CHAINS


def with_rounds(run: RecordedRun, steps: dict[str, int], histogram: tuple[int, ...]) -> RecordedRun:
    response = replace(run.steps[0].responses[0], histogram=histogram, steps_by_strategy=steps)
    return replace(run, steps=(replace(run.steps[0], responses=(response,)),))


def test_acceptance_is_read_by_position(runs: Mapping[str, RecordedRun]) -> None:
    assert acceptance_of(runs["off"]) == ()
    run = with_rounds(runs["chain3"], {"eagle_3_1_4": 100}, (40, 24, 18, 18))
    assert acceptance_of(run) == (pytest.approx(0.6), pytest.approx(0.6), pytest.approx(0.5))


def test_a_shallow_chain_says_nothing_about_deep_positions(runs: Mapping[str, RecordedRun]) -> None:
    """50 rounds with one draft each and 50 with three, all with a first draft accepted 0.8 of the time."""
    run = with_rounds(runs["full-2"], {"eagle_1_1_2": 50, "eagle_3_1_4": 50}, (20, 60, 10, 10))
    assert acceptance_of(run) == (pytest.approx(0.8), pytest.approx(0.5), pytest.approx(0.5))


def test_drafts_that_were_looked_up_are_refused(runs: Mapping[str, RecordedRun]) -> None:
    suffix = {"drafter": "suffix", "depth": 4, "num_draft_tokens": 5}
    tree = runs["full-2"].config.model_dump()
    tree["speculation"]["selector"]["strategies"] = [*CHAINS, suffix]
    run = replace(runs["full-2"], config=ClusterConfig.model_validate(tree))
    few = with_rounds(run, {"eagle_1_1_2": 990, "suffix_4_1_5": 10}, (200, 800))
    assert acceptance_of(few)[0] == pytest.approx(800 / 990, abs=1e-6)
    with pytest.raises(DataError, match=r"looking up in 20 of 100 verify steps.*leave suffix, hybrid and ngram out"):
        acceptance_of(with_rounds(run, {"eagle_1_1_2": 80, "suffix_4_1_5": 20}, (20, 80)))
