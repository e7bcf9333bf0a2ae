"""Which strategy ran and why: numbers, sentences, and the drawing that must stay small."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.types import StrategySpan
from services.report.html import render_html
from services.report.run_data import load_run
from services.report.run_folder import RunFolder
from services.report.strategies import (
    by_bucket,
    by_reason,
    by_strategy,
    gain_of,
    lost_share,
    mean_gain,
    sentences,
    spans_of_rows,
    stretches,
)
from services.report.strategy_section import colours_of, strategy_section
from services.report.strategy_strip import bars, draw_strip, running_curve


def span(at: float, strategy: str = "off", running: int = 2, rounds: int = 10, **changes: object) -> StrategySpan:
    made = StrategySpan(
        at, at + 1.0, strategy, "why", rounds, 1.0, rounds * running, rounds * running, running, running
    )
    return replace(made, **{"slot": "slot 0", "label": "step 1", **changes})  # type: ignore[arg-type]


drawn = st.lists(
    st.builds(
        lambda name, why, running, rounds, off_s: span(0.0, name, running, rounds, reason=why, off_s=off_s, on_s=off_s),
        st.sampled_from(["off", "chain", "tree"]), st.sampled_from(["a", "b", "c"]), st.integers(1, 90),
        st.integers(1, 50), st.sampled_from([None, 0.5, 2.0]),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


@given(drawn)
def test_every_round_is_in_each_table_once(spans: list[StrategySpan]) -> None:
    rounds = sum(s.rounds for s in spans)
    assert sum(row.rounds for row in by_bucket(spans)) == sum(use.rounds for use in by_strategy(spans)) == rounds
    for shares in (
        *(row.share for row in by_bucket(spans)),
        by_reason(spans),
        {u.strategy: u.share for u in by_strategy(spans)},
    ):
        assert math.isclose(sum(shares.values()), 1.0) and all(0 < share <= 1 for share in shares.values())
    buckets = [row.bucket for row in by_bucket(spans)]
    assert buckets == sorted(set(buckets), reverse=True)
    text = " ".join(sentences(spans, []))
    assert all(row.top in text for row in by_bucket(spans))
    assert ("unknown" in text) == (gain_of(spans) is None)


def test_gain_counts_predicted_rounds_only_and_losses_are_told() -> None:
    known = [span(0.0, "chain", off_s=3.0, on_s=1.0), span(1.0, "tree", off_s=0.5, on_s=0.4)]
    assert gain_of([*known, span(2.0)]) == pytest.approx(1.75)
    assert lost_share([*known, span(2.0)]) == pytest.approx(0.5), "the tree was slower than OFF is expected to be"
    assert lost_share([span(0.0, "off", off_s=0.9, on_s=0.9)]) == 0.0 and lost_share([span(0.0)]) is None
    text = " ".join(sentences(known, []))
    assert "1.75 times as long" in text and "50\u00a0% of the time" in text


def test_the_figures_for_off_are_held_against_off_itself() -> None:
    chain, off = span(0.0, "chain", off_s=2.0, on_s=1.0), span(1.0, "off", off_s=0.5, on_s=0.5)
    assert "OFF itself never ran" in " ".join(sentences([chain], []))
    assert "it took 2.00 times the seconds" in " ".join(sentences([chain, off], []))
    elsewhere = replace(chain, slot="slot 1")
    assert "on slot 1 it never ran" in " ".join(sentences([chain, off, elsewhere], []))


def test_predictions_are_compared_over_the_same_steps() -> None:
    steps = [
        {"rollout_s": 100.0, "predicted_gain": None, "achieved_gain": 9.0},
        {"rollout_s": 3.0, "predicted_gain": 2.0, "achieved_gain": 1.0},
        {"rollout_s": 1.0, "predicted_gain": 4.0, "achieved_gain": 3.0},
    ]
    assert mean_gain(steps, "predicted_gain") == 2.5 and mean_gain(steps, "achieved_gain") == 1.5
    assert mean_gain(steps[:1], "achieved_gain") is None


def test_a_drain_with_one_strategy_is_one_stretch() -> None:
    spans = [span(float(i), "chain", running) for i, running in enumerate((16, 8, 4))] + [span(3.0, "off", 2)]
    found = stretches([*spans, span(4.0, "off", 9, label="step 2")])
    told = [(s.strategy, s.running_first, s.running_last, s.rounds, s.end_s) for s in found]
    assert told == [("chain", 16, 4, 30, 3.0), ("off", 2, 2, 10, 4.0), ("off", 9, 9, 10, 5.0)]


def test_bars_of_folded_spans_are_as_long_as_their_rounds_took() -> None:
    folded = [span(0.0, "chain", end_s=10.0, rounds_s=9.0), span(0.5, "tree", end_s=9.0, rounds_s=0.5)]
    alone = span(12.0, "off", end_s=14.0, rounds_s=1.5)
    found = {(s.strategy, start, end) for start, end, s in bars([*folded, alone])}
    assert found == {("chain", 0.0, 9.0), ("tree", 0.5, 1.0), ("off", 12.0, 14.0)}
    assert next(s.strategy for _, _, s in bars([*folded, alone])) == "chain", "the long one lies below"
    curve = running_curve([*folded, alone])
    assert curve == [(0.0, 2.0), (10.0, 2.0), (12.0, 2.0), (14.0, 2.0)], "one line, not back and forth"


def test_a_drawing_of_very_many_spans_stays_small_and_shows_who_ran() -> None:
    rng, names = random.Random(5), ["off", "chain", "tree"]
    many = [span(float(i), names[i // 5000], rng.randint(1, 64)) for i in range(15_000)]
    colours = {"off": "soff", "chain": "s0", "tree": "s1"}
    svg = draw_strip(many, colours, (0.0, 15_000.0), 1160, "x")
    assert len(svg) < 120_000
    starts = {cls: float(re.search(rf'd="M([\d.]+)[^"]*" class="{cls}"', svg)[1]) for cls in ("soff", "s0", "s1")}  # type: ignore[index]
    assert starts["soff"] < starts["s0"] < starts["s1"]


def test_the_section_is_there_when_the_engine_told_rounds(folder: RunFolder, drive: Callable[..., float]) -> None:
    drive(folder)
    run = load_run(folder.path)
    html = strategy_section(run)
    assert "Which strategy ran, and why" in html and 'id="strips"' in html and 'id="strip-step"' in html
    assert "eagle_5_4_16, cheapest per token" in html, "the reason is in the tooltip"
    assert html in render_html(run)
    assert strategy_section(replace(run, strategies=())) == ""
    colours = colours_of(run)
    assert colours["off"] == "soff" and len(set(colours.values())) == len(colours)


def test_what_a_reason_says_cannot_become_markup(folder: RunFolder) -> None:
    folder.strategy(span(0.0, "<script>alert(1)</script>", reason='"><img src=x>'))
    html = render_html(load_run(folder.path))
    assert "<script>" not in html and "<img" not in html


def test_a_line_that_lacks_a_field_is_left_out() -> None:
    row = {f: getattr(span(1.0), f) for f in StrategySpan.__dataclass_fields__}
    assert spans_of_rows([row, {**row, "rounds": None}, {"slot": "slot 0"}, {**row, "later": 1}]) == [span(1.0)] * 2
