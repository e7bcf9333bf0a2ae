"""Which requests' drafter catches up with their context in a round, and how far. Plain Python.

The target's hidden states are kept whether it speculates or not, so the drafter's single layer is all that has to run
over a context it has not seen. Done at once that would still stall decoding for as long as the longest context needs;
in portions it delays every round a little, and only for requests that will live to repay it. The order follows from
earlier rounds alone, as everything that decides who drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

# Share of a request's decode step that a token is expected to save once its drafter is there; the pocket model's chains
# of 2, acceptance length 1.8 and a third of the step spent on drafting, save about 0.25.
_SAVED = 0.25
_CHEAP = 128  # entries that a request gets whatever it may repay: one chunk, as short prompts are
_UNKNOWN = 1 / 8  # share of the tokens left to it that a response is given before others have told how long they last


def expected_remaining(generated: int, left: int, finished: Sequence[int]) -> float:
    """Tokens that a response of `generated` is expected to bring yet, `left` at most.

    The mean over the `finished` lengths that outlived it, with one made-up response that goes on for as long again (a
    young one: for an eighth of what is left): in a long tail what has lasted lasts, and the longest ones have nobody to
    compare with.
    """
    beyond = [min(n - generated, left) for n in finished if n > generated]
    return (min(max(generated, left * _UNKNOWN), left) + sum(beyond)) / (1 + len(beyond))


def catch_up_plan(missing: Sequence[int], remaining: Sequence[float], budget: int, num_layers: int) -> tuple[int, ...]:
    """Drafter entries to run this round for each request, `budget` together, out of those each is `missing`.

    Most remaining tokens per missing entry first, each as far as the budget goes. Nothing for a long context that its
    request would not repay: an entry costs one of the target's `num_layers` layers, a token saves _SAVED of them all.
    """
    assert all(n >= 0 for n in missing) and budget >= 0 and num_layers >= 1
    amounts = [0] * len(missing)
    worth = [r for r, n in enumerate(missing) if n and (n <= _CHEAP or remaining[r] * _SAVED * num_layers >= n)]
    for r in sorted(worth, key=lambda r: -remaining[r] / missing[r]):
        amounts[r] = min(missing[r], budget)
        budget -= amounts[r]
    return tuple(amounts)
