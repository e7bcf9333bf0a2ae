"""Passes padded to a captured size, here recomputed in place of a graph: from the same fixed inputs, stores and weights
that a graph would read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.config.graphs import GraphsConfig
from services.core.errors import ConfigError
from services.core.types import SamplingParams
from services.rollout.captured import Pass, PassGraphs, PassInputs, cuda_graphs, padded
from services.rollout.graphs import GraphSizes, PassSize
from services.rollout.memory import GpuMemory
from services.rollout.rows import tail_mask, tail_table
from tests.services.models.tiny import FAMILIES, random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import EVERY, Switching, check_all, finish, group, make_engine, prompts

VOCAB = 24
SAMPLED = SamplingParams(temperature=1.0, max_tokens=16)


def recomputed(run: Pass, inputs: PassInputs) -> Callable[[], Tensor]:
    return lambda: run(inputs)


def sizes_of(engine, nodes: tuple[int, ...] = (1, 4, 12, 16)) -> GraphSizes:
    return GraphSizes(*engine._rows.tokens.shape, nodes, 10**6, 1.5)


def graphs_of(engine, nodes: tuple[int, ...] = (1, 4, 12, 16), memory_bytes: int = 2**30) -> PassGraphs:
    return PassGraphs(engine._rows, sizes_of(engine, nodes), memory_bytes, recomputed, lambda: GpuMemory(0, 0))


def engine_of(model, graphs: bool, seed: int = 0):
    engine = make_engine(model, Switching(EVERY, seed), random_drafter(spec_of(model)), rows=6, max_len=48)
    if graphs:
        engine.graphs = graphs_of(engine)
    return engine


def test_padding_sees_itself_and_is_seen_by_no_node_of_a_request() -> None:
    """A query that sees nothing has no softmax: NaN in a store reaches every later reader, masked or not."""
    seen = torch.ones(3, 3, dtype=torch.bool).tril()
    given = PassInputs(torch.ones(2, 3).long(), torch.tensor([4, 7]), torch.arange(3), tail_table(seen, torch.float32))
    whole = padded(given, PassSize(4, 5, 256))
    assert whole.ids.shape == (4, 5) and whole.base.tolist() == [4, 7, 0, 0]
    mask = tail_mask(whole.base, whole.table, 12)[:, 0]
    alone = tail_mask(given.base, given.table, 12)[:, 0]
    assert torch.equal(mask[:2, :3], alone)
    for row, base in enumerate(whole.base.tolist()):
        for node in (3, 4):
            assert (mask[row, node] == 0).nonzero()[:, 0].tolist() == [*range(base), base + node]


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_output_is_that_of_plain_decoding(kind: str) -> None:
    model = tiny_model(kind, VOCAB)
    engine = engine_of(model, graphs=True)
    works = [group(ids, 1 + n % 3) for n, ids in enumerate(prompts(VOCAB, 6))]
    check_all(model, finish(engine, works))
    assert engine.graphs is not None and engine.graphs.replayed > 10


@pytest.mark.parametrize("seed", range(3))
def test_sampled_output_is_the_same_with_and_without(seed: int) -> None:
    model = tiny_model("qwen2", VOCAB)
    works = [group(ids, 2, SAMPLED, first_seed=10 * n) for n, ids in enumerate(prompts(VOCAB, 4, seed))]
    plain, captured = (finish(engine_of(model, graphs, seed), works) for graphs in (False, True))
    assert {k: r.response_ids for k, r in plain.items()} == {k: r.response_ids for k, r in captured.items()}
    for name, r in plain.items():
        assert r.rollout_logprobs == pytest.approx(captured[name].rollout_logprobs, abs=1e-4)


def test_graphs_go_on_with_new_weights() -> None:
    """They hold addresses: a load that brought new tensors would leave them on the old policy."""
    old, new = tiny_model("llama", VOCAB), tiny_model("llama", VOCAB, 1)
    engine = engine_of(old, graphs=True)
    finish(engine, [group(ids) for ids in prompts(VOCAB, 6)])
    before = engine._target.weights.layers[0].qkv.data_ptr()
    engine.load_policy(1, tensors_of(new))
    assert engine._target.weights.layers[0].qkv.data_ptr() == before
    check_all(new, finish(engine, [group(ids, name=f"again {ids}") for ids in prompts(VOCAB, 6)]))


def test_memory_that_was_lent_out_leaves_no_graph_behind() -> None:
    """They hold addresses: what comes back may lie elsewhere."""
    model = tiny_model("llama", VOCAB)
    engine = engine_of(model, graphs=True)
    graphs = engine.graphs
    finish(engine, [group(ids) for ids in prompts(VOCAB, 6)])
    assert graphs is not None and graphs.parts()
    engine.switch_memory(True)
    assert not graphs.parts()
    engine.switch_memory(False)
    replayed = graphs.replayed
    check_all(model, finish(engine, [group(ids, name=f"again {ids}") for ids in prompts(VOCAB, 6)]))
    assert graphs.parts() and graphs.replayed > replayed, "sizes that come again are captured again"


def test_capturing_is_no_part_of_a_round_and_leaves_the_rows_as_they_are() -> None:
    """Whatever it writes, and however long it takes: the selector is told of the strategy's own seconds."""
    model, extra_s = tiny_model("qwen3", VOCAB), [0.0]
    selector = Switching(EVERY, 1)
    engine = make_engine(model, selector, random_drafter(spec_of(model)), rows=6, max_len=48)
    tick = engine._clock
    engine._clock = engine._watch.clock = lambda: tick() + extra_s[0]
    states = []

    def slow(run: Pass, inputs: PassInputs) -> Callable[[], Tensor]:
        rows, known = engine._rows, [slice(0, int(n) - 1) for n in engine._rows.lengths[: engine._rows.count]]
        before = [[store[r, k].clone() for store in rows.kv.layers] for r, k in enumerate(known)]
        run(inputs)
        states.extend(
            torch.equal(a, store[r, k])
            for r, k in enumerate(known)
            for a, store in zip(before[r], rows.kv.layers, strict=True)
        )
        extra_s[0] += 1000.0
        return lambda: run(inputs)

    engine.graphs = PassGraphs(engine._rows, sizes_of(engine), 2**30, slow, lambda: GpuMemory(0, 0))
    check_all(model, finish(engine, [group(ids) for ids in prompts(VOCAB, 6)]))
    assert extra_s[0] >= 3000.0 and states and all(states)
    assert max(o.seconds.total for o in selector.recorded) < 1.0


def test_without_memory_nothing_is_captured() -> None:
    model = tiny_model("llama", VOCAB)
    engine = make_engine(model, rows=2)
    engine.graphs = graphs_of(engine, memory_bytes=0)
    check_all(model, finish(engine, [group((1, 2, 3), 2)]))
    assert engine.graphs.replayed == 0 and engine.graphs.parts() == ()


def test_graphs_on_a_processor_are_refused() -> None:
    engine = make_engine(tiny_model("llama", VOCAB))
    with pytest.raises(ConfigError, match="needs a CUDA device, and the model is on cpu: leave it out"):
        cuda_graphs(engine._rows, GraphsConfig(), (1,), "rollout-0")
