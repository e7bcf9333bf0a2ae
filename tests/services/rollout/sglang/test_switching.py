"""Switching depths in SGLang's scheduler process, round by round, over stand-ins that are as particular as SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.config.load import load_config
from services.config.schema import SGLangEngine
from services.core.errors import ConfigError
from services.rollout.memory import GpuMemory
from services.rollout.sglang import plugin
from services.rollout.sglang.order import switch_order
from services.rollout.sglang.rounds import histograms, newest_depth
from services.rollout.sglang.streams import capture_drafter, shared_streams
from services.rollout.sglang.switching import (
    FREE,
    SWITCH,
    Switch,
    force_depth,
    restore_learned,
    switch_of,
    take_spans,
    tell_learned,
    told_state,
)
from tests.services.rollout.sglang.graphing import GRAPHS, graph_capture, install_graphs
from tests.services.rollout.sglang.scheduling import Request, SwitchingScheduler
from tests.services.rollout.sglang.standins import HookRegistry, Scheduler, install, put_module

SIZES = [1, 2, 3, 4, 6, 8, 12, 16]
RANDOM = (
    "speculation.selector={type: beg_mab, epsilon: 1.0, buckets: [{strategies: [{}, "
    + ", ".join(f"{{drafter: eagle, depth: {d}, num_draft_tokens: {d + 1}}}" for d in (1, 3, 5))
    + "]}]}"
)
DEPTHS = (0, 1, 3, 5)


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    install(monkeypatch)
    install_graphs(monkeypatch)
    plugin.register()
    context = SimpleNamespace(_overrides_log=[])
    put_module(monkeypatch, "sglang.srt.runtime_context", get_context=lambda: context)
    return context


def order_file(folder: Path, max_nodes: int = 48, memory: int = 2**40, step: float = 1.0) -> str:
    graphs = f"graphs: {{max_nodes: {max_nodes}, memory_bytes: {memory}, step: {step}}}"
    overrides = (f"rollout.engine={{type: sglang, max_running: 16, {graphs}}}", "placement.mode=local", RANDOM)
    config = load_config(overrides=overrides)
    assert isinstance(config.rollout.engine, SGLangEngine)
    order = switch_order(config, config.rollout.engine, 0)
    assert order is not None
    file = folder / f"{max_nodes}-{memory}-{step}.json"
    file.write_text(order.text())
    return str(file)


def started(folder: Path, probs: bool = False, attention: str = "triton", **graphs: Any) -> SwitchingScheduler:
    scheduler = SwitchingScheduler(5, list(SIZES), order_file(folder, **graphs), probs, attention=attention)
    scheduler.start()
    return scheduler


def requests(count: int = 6) -> list[Request]:
    return [Request(prompt=4 + n, budget=20 + 9 * n) for n in range(count)]


# ------------------------------------------------------------------ capturing


@pytest.mark.parametrize("attention", ["triton", "fa3"])
def test_each_depth_has_graphs_of_its_own_width_for_its_own_batch_sizes(tmp_path: Path, attention: str) -> None:
    """With FlashAttention-3 SGLang captures none of the drafter's catching up."""
    scheduler = started(tmp_path, attention=attention)
    states = scheduler.draft_worker.adaptive_controller._states
    assert states.keys() == set(DEPTHS)
    for depth, state in states.items():
        assert state.target.width == state.extend.width == depth + 1, "else the state's rounds run without the graph"
        assert state.target.sizes == state.extend.sizes
        assert max(state.target.sizes) == (16 if depth == 0 else min(16, 48 // (depth + 1)))
    runner = scheduler.draft_worker.target_worker.model_runner
    assert runner.logits_rows == max(max(s.target.sizes) * s.target.width for s in states.values())


@pytest.mark.parametrize("attention", ["triton", "fa3"])
def test_target_and_drafter_each_capture_all_depths_on_one_stream_and_other_engines_as_sglang_does(
    tmp_path: Path, attention: str
) -> None:
    """PyTorch keeps a cuBLAS workspace for each stream."""
    states = started(tmp_path, attention=attention).draft_worker.adaptive_controller._states.values()
    targets = {state.target.stream for state in states}
    drafters = {graphs.stream for state in states for graphs in (state.draft, state.extend)}
    assert len(targets) == len(drafters) == 1 and targets != drafters
    with graph_capture() as one, graph_capture() as other:
        assert len({one.stream, other.stream, *targets, *drafters}) == 4, "afterwards a capture has its own again"
    assert started(tmp_path).draft_worker.state.target.stream not in targets, "an engine's own"


@pytest.mark.parametrize("attention", ["triton", "fa3"])
def test_at_every_depth_what_a_draft_leaves_behind_survives_the_verification(tmp_path: Path, attention: str) -> None:
    """Draft probabilities are read behind it: anything else in their place accepts drafts at random."""
    for state in started(tmp_path, attention=attention).draft_worker.adaptive_controller._states.values():
        assert state.draft.results not in state.target.used, state.speculative_num_steps
        assert state.target.results not in state.extend.used, "the states that the drafter catches up with"


@pytest.mark.parametrize("attention", ["triton", "fa3"])
@pytest.mark.parametrize("off", [{"decode": "disabled"}, {"catching_up": False}], ids=str)
def test_who_switches_graphs_off_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, off: dict[str, Any]
) -> None:
    scheduler = SwitchingScheduler(5, list(SIZES), None, False, attention=attention)
    scheduler.draft_worker.draft_runner.make_logits_buffer()
    worker = scheduler.draft_worker.draft_worker
    for name, value in off.items():
        monkeypatch.setattr(GRAPHS, name, value)
    capture_drafter(type(worker)._capture_cuda_graphs, worker)
    assert worker.cuda_graph_runner_for_draft_extend is None


def test_with_another_attention_nothing_of_sglang_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("sglang.srt.model_executor") or n == "sglang.srt.environ"]:
        monkeypatch.delitem(sys.modules, name)
    assert len(started(tmp_path).draft_worker.adaptive_controller._states) == len(DEPTHS)


def test_whoever_brings_a_stream_captures_on_it(tmp_path: Path) -> None:
    mine = object()
    with shared_streams(), graph_capture() as shared, graph_capture(stream=mine) as brought:
        assert brought.stream is mine is not shared.stream


def test_a_failed_start_shares_no_stream_with_what_follows() -> None:
    with pytest.raises(RuntimeError), shared_streams(), graph_capture() as failed:
        raise RuntimeError
    with graph_capture() as following:
        assert following.stream is not failed.stream


def test_the_arguments_are_as_they_were_afterwards(tmp_path: Path) -> None:
    scheduler = started(tmp_path)
    for arguments in (scheduler.server_args, scheduler.draft_worker.server_args):
        assert arguments.cuda_graph_config.decode.bs == SIZES
        assert (arguments.speculative_num_steps, arguments.speculative_num_draft_tokens) == (5, 6)


def test_without_the_order_sglang_decides_for_itself(tmp_path: Path) -> None:
    stock = tmp_path / "stock.json"
    stock.write_text('{"1": {"candidate_steps": [1, 5]}}')
    scheduler = SwitchingScheduler(5, list(SIZES), str(stock), False)
    with pytest.raises(AssertionError, match="SGLang's own choice of graphs"):
        scheduler.start()
    assert switch_of(scheduler.draft_worker) is None and told_state(scheduler.draft_worker) == {}


def test_an_engine_that_refused_to_switch_does_not_start(tmp_path: Path) -> None:
    scheduler = SwitchingScheduler(5, list(SIZES), order_file(tmp_path), False, adaptive=False)
    with pytest.raises(ConfigError, match="SGLang refused to switch depths"):
        scheduler.start()


def test_strategies_beyond_the_memory_are_left_out_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = [2**33]

    def growing() -> GpuMemory:
        """Another engine takes sixteen times as much meanwhile."""
        held[0] += 2**28
        return GpuMemory(held[0], 2**40 - 17 * held[0])

    monkeypatch.setattr("services.rollout.sglang.switching.gpu_memory", growing)
    scheduler = started(tmp_path, memory=2**29 + 2**28 + 2**26)
    assert scheduler.draft_worker.adaptive_controller._states.keys() == {0, 1, 5}
    assert "depth 3 left out" in capsys.readouterr().err
    scheduler.run(requests())
    assert {depth for _, depth in scheduler.launched} == {0, 1, 5}
    with pytest.raises(ConfigError, match="depth 3 is not among the captured"):
        force_depth(scheduler, 3)
    graphs = told_state(scheduler.draft_worker)["graphs"]
    assert {g["depth"]: (g["bytes"], g["device_bytes"]) for g in graphs} == dict.fromkeys(
        (5, 0, 1), (2**28, 17 * 2**28)
    )


# ------------------------------------------------------------------ rounds


@pytest.mark.parametrize("probs", [False, True], ids=["argmax", "sampled"])
def test_every_round_runs_what_our_selector_chose_and_is_counted_under_it(tmp_path: Path, probs: bool) -> None:
    """SGLang launches ahead, and its own rules want another depth at every turn."""
    scheduler = started(tmp_path, probs=probs)
    told = requests()
    scheduler.run(told)
    depths = [depth for _, depth in scheduler.launched]
    assert set(depths) == set(DEPTHS) and len({*pairwise(depths)}) > 8
    assert all(depth == 0 or running * (depth + 1) <= 48 for running, depth in scheduler.launched)
    counted: Counter[int] = Counter()
    for r in told:
        rows = histograms(r.spec_correct_drafts_histogram)
        counted.update({d: sum(row) for d, row in rows.items()})
        assert newest_depth(r.spec_correct_drafts_histogram) in DEPTHS
        emitted = 1 + sum((k + 1) * n for row in rows.values() for k, n in enumerate(row))
        assert emitted == len(r.output_ids) >= r.budget
    spans = json.loads(take_spans(scheduler))
    steps: Counter[int] = Counter()
    for span in spans:
        steps[0 if span["strategy"] == "off" else int(span["strategy"].split("_")[1])] += span["verify_steps"]
    assert sum(s["rounds"] for s in spans) <= len(depths)
    assert all(counted[d] <= steps[d] for d in counted), "of the last ones, some requests had ended"
    kept = sum(r.finished_len or 0 for r in told) - len(told)
    assert sum(s["tokens"] for s in spans) == kept, "what lies behind a stop was not gained"


def test_a_request_that_had_ended_is_not_counted_again(tmp_path: Path) -> None:
    """It is still in the round that was launched before its end was read."""
    scheduler = started(tmp_path)
    short, long = Request(prompt=3, budget=100, stop_at=4), Request(prompt=3, budget=60)
    scheduler.run([short, long])
    rounds = sum(sum(row) for row in histograms(short.spec_correct_drafts_histogram).values())
    assert rounds <= 3 and len(short.output_ids) < 4 + 6


def test_a_forced_depth_holds_from_the_next_round_on(tmp_path: Path) -> None:
    scheduler = started(tmp_path)
    wanted = iter([5, 0, 3, 1, 5, 0])
    asked: list[int] = []

    def force() -> None:
        depth = next(wanted, FREE)
        asked.append(depth)
        force_depth(scheduler, depth)

    scheduler.run(requests(2), force)
    assert [depth for _, depth in scheduler.launched][:6] == asked[:6]
    assert told_state(scheduler.draft_worker)["depth"] == scheduler.launched[-1][1]


def test_switching_leaves_no_trail(tmp_path: Path, context: SimpleNamespace) -> None:
    """SGLang would keep every switch of a run in a list, and read all of it whenever it is asked for its state."""
    scheduler = started(tmp_path)
    context._overrides_log = scheduler.draft_worker.overrides
    kept = ("load", {"x": 1})
    context._overrides_log.append(kept)
    scheduler.run(requests())
    assert scheduler.draft_worker.overrides == [kept]


def test_the_other_ranks_do_what_the_first_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = started(tmp_path)
    monkeypatch.setattr(Switch, "agreed", lambda self, value: 3)
    scheduler.draft_worker.ps = SimpleNamespace(tp_rank=1, tp_size=2)
    switch = switch_of(scheduler.draft_worker)
    assert switch is not None
    follower = Switch(switch.order, scheduler.draft_worker, SIZES)
    follower.captured.update(switch.captured)
    setattr(scheduler.draft_worker, SWITCH, follower)
    told = requests(3)
    scheduler.run(told)
    assert {depth for _, depth in scheduler.launched} == {3}
    assert all(histograms(r.spec_correct_drafts_histogram).keys() == {3} for r in told)
    assert json.loads(take_spans(scheduler)) == [], "the first rank tells"


RANK = """
import sys
from types import SimpleNamespace
import torch.distributed as dist
from services.rollout.sglang.order import read_order
from services.rollout.sglang.switching import Switch
rank, file, order = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
group = SimpleNamespace(ranks=[0, 1], cpu_group=dist.group.WORLD)
target = SimpleNamespace(model_runner=SimpleNamespace(tp_group=group))
started_with = SimpleNamespace(attention_backend="triton")
worker = SimpleNamespace(ps=SimpleNamespace(tp_rank=rank, tp_size=2), target_worker=target, server_args=started_with)
switch = Switch(read_order(order), worker, [1, 2])
print([switch.agreed(10 * rank + n) for n in range(3)])
dist.destroy_process_group()
"""


def test_two_ranks_agree_on_what_the_first_one_says(tmp_path: Path) -> None:
    """Over the group of processes that SGLang has for its requests."""
    command = [sys.executable, "-c", RANK]
    arguments = [str(tmp_path / "rendezvous"), order_file(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert told == ["[0, 1, 2]\n"] * 2


def test_a_pause_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, held = started(tmp_path), []
    switch = switch_of(scheduler.draft_worker)
    assert switch is not None
    monkeypatch.setattr(switch.decider, "hold", held.append)
    pause = HookRegistry.hooked("sglang.srt.managers.scheduler.Scheduler.pause_generation", lambda s, request: "paused")
    assert pause(scheduler, object()) == "paused" and len(held) == 1
    assert pause(Scheduler(draft_worker=None), object()) == "paused", "an engine without speculation pauses too"


def test_what_the_selector_learned_goes_on_in_another_process(tmp_path: Path) -> None:
    scheduler, other = started(tmp_path), started(tmp_path)
    scheduler.run(requests())
    text = tell_learned(scheduler)
    told = json.loads(text)
    assert told["place"] == "sglang on cpu, triton attention" and told["learned"]["kind"]
    assert tell_learned(other) != text
    assert restore_learned(other, text) == "true" and tell_learned(other) == text
    assert restore_learned(other, json.dumps({**told, "place": "sglang on another card"})) == "false"
