from __future__ import annotations

from random import Random

import pytest

from services.simulator.unseen import Unseen


@pytest.mark.parametrize("seed", range(50))
def test_it_is_the_sum_over_all_requests(seed: int) -> None:
    """Against a list of requests: [number, context less progress, tokens of it that the drafter has seen]."""
    rng, unseen, progress, taken = Random(seed), Unseen(), 0.0, 0
    running: list[list[float]] = []
    for _ in range(200):
        match rng.choice(("join", "join", "leave", "plain", "drafted")):
            case "join":
                taken += 1
                running.append([taken, rng.randint(1, 50) - progress, 0.0])
                unseen.joined(running[-1][1])
            case "leave" if running:
                number, base, _ = running.pop(rng.randrange(len(running)))
                unseen.left(int(number), base)
            case "drafted" if running:
                for request in running:
                    request[2] = request[1] + progress
                unseen.drafted(taken, progress)
                progress += rng.uniform(1, 4)
            case "plain" if running:
                progress += rng.randint(1, 5)
        by_hand = sum(base + progress - seen for _, base, seen in running)
        assert unseen.tokens(len(running), progress) == pytest.approx(by_hand, abs=1e-6)
