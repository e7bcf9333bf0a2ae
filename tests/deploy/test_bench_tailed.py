"""The long-tailed benchmark without a GPU: its workload, its watching, its modes and its figures."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import bench_graphs
from deploy.bench_tailed import SIGMA, _batches, chosen_modes, stall_context, summary, table
from deploy.cli_shared import config_of
from deploy.tailed_plot import draw
from deploy.tailed_runs import LAG, TAIL, TailRun, fitting, lognormal_lengths, run_tail, switch_stall
from deploy.tailed_server import OURS, STOCK, mode_arguments, mode_configs
from services.core.errors import ConfigError
from services.core.spans import StrategySpan
from services.core.types import SamplingParams
from services.data.traces import chain_sum_trace
from services.rollout.sglang.engine import SGLangEngine
from services.rollout.sglang.order import strategies_by_depth
from services.speculation.strategy import OFF
from tests.services.models.tiny import tensors_of
from tests.services.rollout.engines import group, letters
from tests.services.rollout.sglang.fake import FakeHandle, limits_of
from tests.services.rollout.sglang.serving import DRAFTER, MODEL, SWITCHED

SVG = "{http://www.w3.org/2000/svg}"


# ------------------------------------------------------------------ the workload


@pytest.mark.parametrize("count", [128, 256])
def test_the_longest_response_is_more_than_ten_times_the_median(count: int) -> None:
    lengths = lognormal_lengths(count, 1024, SIGMA)
    assert len(lengths) == count and lengths[-1] == 1024 and lengths == sorted(lengths)
    assert lengths[-1] >= 10 * median(lengths) and lengths[0] >= 2


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.lists(st.integers(1, 60), max_size=20))
def test_each_length_goes_to_a_prompt_of_its_own_that_writes_so_much(lengths: list[int], more: list[int]) -> None:
    natural = [*lengths, *more]
    assert [natural[i] for i in fitting(lengths, natural)] == lengths, "a perfect match is there"
    short = [max(1, n - 7) for n in natural]
    chosen = fitting(lengths, short)
    assert len(set(chosen)) == len(lengths)
    left = [short[i] for i in set(range(len(short))) - set(chosen)]
    for n, i in zip(lengths, chosen, strict=True):
        assert not any(n <= other < short[i] for other in left), "too long, and a shorter one would have done"
        assert short[i] >= n or all(other <= short[i] for other in left), "too short, and a longer one is left"


def test_batches_are_of_prompts_whose_traces_are_about_as_long() -> None:
    config = config_of("reasoner-adaptive", ["model.path=pocket", "data.source.size=3000"])
    (one, other) = _batches(config, 2, 64)
    assert not {w.prompt.text for w in one} & {w.prompt.text for w in other}
    gaps = [len(chain_sum_trace(w.prompt.text, Random(0))) - w.sampling.max_tokens for w in one]
    assert sum(0 <= gap <= 40 for gap in gaps) >= 48, gaps
    with pytest.raises(ConfigError, match=r"raise data\.source\.size"):
        _batches(config, 9, 64)


# ------------------------------------------------------------------ watching an engine


class Slow(FakeHandle):
    """Rounds take time: `off_s` or `on_s`, and `stall_s` more behind a switch to that depth."""

    def __init__(self, **options: Any) -> None:
        super().__init__(MODEL, switching=SWITCHED, **options)
        self.now_s, self.stalls, self.log = 0.0, {}, list[int]()

    def _round(self) -> None:
        super()._round()
        depth = self.native.last_strategy.depth
        switched = bool(self.log) and self.log[-1] != depth
        self.log.append(depth)
        self.now_s += (0.010 if depth == 0 else 0.016) + (self.stalls.get(depth, 0.0) if switched else 0.0)


def engine_of(handle: Slow) -> tuple[SGLangEngine, Callable[[], float]]:
    def clock() -> float:
        return handle.now_s

    engine = SGLangEngine(handle, limits_of(MODEL, SWITCHED[-1]), {s.depth: s for s in SWITCHED}, letters, clock)
    engine.load_policy(0, tensors_of(MODEL))
    engine.load_drafter(0, DRAFTER)
    return engine, clock


def test_a_batch_is_followed_to_its_end_and_its_tail_is_told_apart() -> None:
    handle = Slow()
    engine, clock = engine_of(handle)
    lengths = [4, 5, 6, 7, 8, 9, 10, 40, 60, 60]
    work = [group((1, 3 + i), 1, SamplingParams(max_tokens=n), first_seed=i) for i, n in enumerate(lengths)]
    run = run_tail(engine, work, clock)
    assert run.tokens == sum(lengths) and run.seconds == pytest.approx(handle.now_s)
    assert run.timeline[0][1] == 10 and run.timeline[-1][1] == 0
    assert all(a[1] >= b[1] and a[2] <= b[2] for a, b in itertools.pairwise(run.timeline))
    first = next(p for p in run.timeline if p[1] <= TAIL)
    assert run.tail_s == pytest.approx(run.seconds - first[0]) and run.tail_tokens == run.tokens - first[2]
    assert run.acceptance_length is not None and set(run.steps_by_strategy) == {s.name for s in SWITCHED}
    assert {s.strategy for s in run.spans} <= {s.name for s in SWITCHED} and run.spans


@pytest.mark.parametrize(("stall_on", "stall_off"), [(0.0, 0.0), (0.025, 0.0), (0.0, 0.015)])
def test_what_a_switch_costs_is_found(stall_on: float, stall_off: float) -> None:
    handle = Slow()
    handle.stalls = {5: stall_on, 0: stall_off}
    engine, clock = engine_of(handle)
    contexts = [[1, 4 + n, 7] for n in range(4)]
    found = switch_stall(engine, contexts, (OFF, SWITCHED[-1]), clock, settle=5, after=3)
    assert found.off_round_s == pytest.approx(0.010) and found.on_round_s == pytest.approx(0.016)
    assert found.on_steps == pytest.approx(stall_on / 0.010)
    lag = LAG * (0.016 - 0.010)  # granted, and not used here
    assert found.off_steps == pytest.approx(max(0.0, stall_off - lag) / 0.010)
    assert engine.num_running == 0


# ------------------------------------------------------------------ modes


def test_every_mode_is_an_engine_of_its_own() -> None:
    modes = mode_configs(config_of("reasoner-adaptive", []))
    assert list(modes) == ["off", "eagle_1_1_2", "eagle_3_1_4", "eagle_5_1_6", STOCK, OURS]
    depths = {mode: set(strategies_by_depth(c.speculation)) for mode, c in modes.items()}
    assert depths == {
        "off": {0}, "eagle_1_1_2": {1}, "eagle_3_1_4": {3}, "eagle_5_1_6": {5}, STOCK: {7}, OURS: {0, 1, 3, 5}
    }  # fmt: skip
    assert not strategies_by_depth(modes[STOCK].speculation)[7].sampled


def test_only_the_stock_mode_adapts_by_sglangs_rule_and_all_generate_the_same_lengths() -> None:
    for mode in ("off", STOCK, OURS):
        arguments = mode_arguments(mode, {"x": 1})
        assert arguments["x"] == 1 and arguments["preferred_sampling_params"] == '{"ignore_eos": true}'
        assert arguments.get("speculative_adaptive") == (True if mode == STOCK else None)


@pytest.mark.parametrize("preset", ["reasoner-sglang", "reasoner-warmup"])
def test_a_configuration_without_several_strategies_is_refused(preset: str) -> None:
    with pytest.raises(ConfigError, match=r"compares strategies of an SGLang engine: give it"):
        mode_configs(config_of(preset, []))
    with pytest.raises(ConfigError, match="needs an SGLang engine whose selector has several"):
        bench_graphs.variants(config_of(preset, []))


def test_contexts_are_as_long_as_the_engine_allows() -> None:
    assert stall_context(config_of("reasoner-adaptive", [])) == 1408 - 512
    assert stall_context(config_of("reasoner-adaptive", ["rollout.engine.max_len=6000"])) == 4000
    short = ["rollout.engine.max_len=500", "data.max_prompt_tokens=100", "rollout.sampling.max_tokens=100"]
    with pytest.raises(ConfigError, match=r"rollout\.engine\.max_len must hold 512 tokens"):
        stall_context(config_of("reasoner-adaptive", short))


def test_modes_can_be_left_out_but_for_those_that_are_compared() -> None:
    modes = mode_configs(config_of("reasoner-adaptive", []))
    assert chosen_modes(modes, None) == modes
    assert list(chosen_modes(modes, f"{OURS},off,eagle_3_1_4")) == ["off", "eagle_3_1_4", OURS]
    with pytest.raises(ConfigError, match=r"--modes has eagle_9: it takes off, eagle_1_1_2"):
        chosen_modes(modes, f"off,eagle_9,{OURS}")
    for few in ("off,eagle_3_1_4", f"off,{OURS}", OURS):
        with pytest.raises(ConfigError, match="must have off, ours and one more"):
            chosen_modes(modes, few)


# ------------------------------------------------------------------ figures


def run_of(seconds: float, tail_s: float, strategy: str = "off") -> TailRun:
    return TailRun(seconds, 1000, 2.5, tail_s, 100, ((0.0, 128, 0), (seconds, 0, 1000)), {strategy: 9}, ())


def test_ratios_are_those_of_the_repeats() -> None:
    runs = {
        "off": [run_of(10, 4), run_of(20, 8), run_of(10, 4)],
        "eagle_3_1_4": [run_of(8, 3), run_of(16, 6), run_of(9, 3)],
        OURS: [run_of(5, 2), run_of(10, 2), run_of(6, 1)],
    }
    found = summary(runs)
    assert found["best_other"] == "eagle_3_1_4" and found["ours_vs_best"] == 1.6 and found["tail_vs_off"] == 4.0
    assert found["modes"]["off"]["seconds"] == 10 and found["modes"][OURS]["spread"] == [5, 10]
    text = table(found | {"switch": {"on_steps": 0.5, "off_steps": 0.1, "context": 4000}})
    assert "1.600x" in text and "4.00x" in text and "on costs 0.50 decode steps" in text


def test_the_plot_is_a_drawing_with_every_mode() -> None:
    drawn = draw({"off": run_of(10, 4), OURS: run_of(5, 2)})
    root = ET.fromstring(drawn)
    assert root.tag.endswith("svg") and "off" in drawn and OURS in drawn
    assert len(root.findall(f".//{SVG}path")) == 2


def test_a_strategy_has_the_colour_of_the_mode_that_is_nothing_else() -> None:
    chosen = tuple(StrategySpan(0, 1, name, "", 1, 1.0, 1, 1, 8, 8) for name in ("eagle_5_1_6", "eagle_3_1_4", "off"))
    drawn = ET.fromstring(
        draw({"off": run_of(10, 4), "eagle_3_1_4": run_of(8, 3), OURS: replace(run_of(5, 2), spans=chosen)})
    )
    lines = [path.attrib["class"].split()[-1] for path in drawn.iter(f"{SVG}path")]
    bars = [rect.attrib["class"].split()[-1] for rect in drawn.iter(f"{SVG}rect") if "bar" in rect.attrib["class"]]
    assert bars[1:] == [lines[1], lines[0]] and bars[0] not in lines


def test_graphs_of_the_naive_set_have_no_limit() -> None:
    config = config_of("reasoner-adaptive", [])
    found = bench_graphs.variants(config)
    assert set(strategies_by_depth(found["one_strategy"].speculation)) == {5} and found["pool"] is config
    graphs = found["naive"].rollout.engine.graphs
    assert graphs.free_nodes == 0 and graphs.max_nodes > 10**8
    part = {"depth": 5, "largest": 8, "count": 3, "device_bytes": 100, "seconds": 1.0}
    told = bench_graphs.summary(
        {"one_strategy": [part], "naive": [part] * 4, "pool": [part, part | {"device_bytes": 25}]}
    )
    assert told["ratio"] == 1.25 and told["naive_ratio"] == 4.0
    assert "1.25" in bench_graphs.table(told)
