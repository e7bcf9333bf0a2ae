from __future__ import annotations

from random import Random

import pytest

from services.core.types import GroupWork, Prompt, SamplingParams
from services.simulator.learning import Learning
from services.simulator.scenario import Recorded
from services.simulator.server import Prices, ServerModel, ids
from services.speculation.cost_table import CostTable
from tests.services.simulator.worlds import cluster, scenario

READ_S = 1e-6  # of a token of context
READING = CostTable({"verify/read": READ_S}, (0.0,), 0.0)


def group(name: str, prompt_tokens: int, size: int = 4) -> GroupWork:
    numbers, sampling = tuple(range(size)), SamplingParams(1.0, max_tokens=2000)
    return GroupWork(name, Prompt(name, "", ids(prompt_tokens), "", "simulated"), numbers, numbers, sampling)


def server(lengths: dict[tuple[str, int], int], dense: bool, mode: str = "off") -> ServerModel:
    """With room for 8; nothing but reading keys and values takes time."""
    assumed = scenario(lengths=Recorded(lengths), dense=dense, prefill_rate=1e12, costs=READING, stretch=1)
    model = ServerModel(cluster(1, mode), assumed, Prices(READING), 0)
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


def test_a_learning_server_goes_through_any_strategies_and_lengths() -> None:
    """Drafts take requests to broken numbers of tokens, requests come and end at any of them: what a dense pass reads
    stays no less than all contexts, and those no less than what the drafter has yet to see (a view refuses else)."""
    for seed in range(260):
        _random_strategies(Random(seed))


def _random_strategies(rng: Random) -> None:
    prompt_tokens, names = rng.randint(1, 40), ("a", "b", "c")[: rng.randint(1, 3)]
    lengths = {(n, i): rng.choice((60, 200) if i < 2 else (3, 6, 12)) for n in names for i in range(4)}
    model, finished = server(lengths, dense=True, mode="full"), 0
    model.load_drafter(0, Learning().first(), 0.0)
    model.submit([group(n, prompt_tokens) for n in names], 0.0)
    while finished < len(lengths):
        model.set_strategy(rng.choice(("off", "off", "off", "eagle_1_1_2", "eagle_3_1_4")), 0.0)
        finished += len(model.advance(rng.choice((20, 200, 2000, 20000)) * READ_S, 0.0)[0].finished)
