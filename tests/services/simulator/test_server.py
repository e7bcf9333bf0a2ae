from __future__ import annotations

import pytest

from services.core.types import GroupWork, Prompt, SamplingParams
from services.simulator.scenario import Recorded
from services.simulator.server import Prices, ServerModel, ids
from services.speculation.cost_table import CostTable
from tests.services.simulator.worlds import cluster, scenario

READ_S = 1e-6  # of a token of context
READING = CostTable({"verify/read": READ_S}, (0.0,), 0.0)


def group(name: str, prompt_tokens: int, size: int = 4) -> GroupWork:
    numbers, sampling = tuple(range(size)), SamplingParams(1.0, max_tokens=2000)
    return GroupWork(name, Prompt(name, "", ids(prompt_tokens), "", "simulated"), numbers, numbers, sampling)


def server(lengths: dict[tuple[str, int], int], dense: bool) -> ServerModel:
    """With room for 8; nothing but reading keys and values takes time."""
    assumed = scenario(lengths=Recorded(lengths), dense=dense, prefill_rate=1e12, costs=READING, stretch=1)
    model = ServerModel(cluster(1, "off"), assumed, Prices(READING), 0)
    model.load_policy(0, 0.0)
    model.open_epoch(0, 0.0)
    return model


@pytest.mark.parametrize(("dense", "width"), [(True, 8 * 400), (False, 4 * 400 + 4 * 10)])
def test_a_dense_block_is_read_as_wide_as_its_longest_request(dense: bool, width: int) -> None:
    """Eight responses of 50 tokens, four behind a prompt of 400 tokens and four behind one of 10."""
    model = server({(name, i): 50 for name in ("long", "short") for i in range(4)}, dense)
    model.submit([group("long", 400), group("short", 10)], 0.0)
    report, seconds = model.advance(10.0, 0.0)
    assert len(report.finished) == 8
    by_hand = sum(width + 8 * (done + 0.5) for done in range(50)) * READ_S
    assert seconds == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.parametrize(("dense", "running"), [(True, 7), (False, 8)])
def test_a_dense_block_takes_a_group_in_whole(dense: bool, running: int) -> None:
    """One of eight has ended; four wait."""
    lengths = {(name, i): 1000 for name in ("a", "b", "c") for i in range(4)} | {("a", 0): 10}
    model = server(lengths, dense)
    model.submit([group("a", 50), group("b", 50), group("c", 50)], 0.0)
    report, _ = model.advance(20 * 8 * 60 * READ_S, 0.0)
    assert len(report.finished) == 1
    assert (len(report.running), report.waiting) == (running, 11 - running)
