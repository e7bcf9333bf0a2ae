"""What rounds cost, from nothing but when responses ended: the rollouts of a run with one strategy are its stopwatch.

All requests of a server go on in lockstep, one round each. So between two ends that follow one another in rounds lie
as many rounds as one response has more than the other, with as many running as had not ended yet:

    rounds    0 ................ 310 .... 355 ......... 480
    ends                          a        b             c
    running   3                   2        1
    seconds   prefill + 310 * r3  45 * r2  125 * r1

An end may be seen late: ends in the wrong order tell how late at least. So neighbouring gaps are joined until they
span SPAN times that, which leaves some tenth of error at worst and none in the mean, and MIN_ROUNDS, which even out
single slow rounds. What is left at the end goes to the last one; a server whose rollouts all end within less tells
nothing. A joined gap counts at its mean number of running requests and its mean context, both over its rounds: costs
bend little in between.

Left out is what is not in lockstep: more requests than run at once, one that began after the first end, ends in another
order than that of their rounds. Before the first end lies the prefill; that stretch tells its rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from math import ceil, log

from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.round import RoundView
from services.speculation.strategy import DraftStrategy

SPAN = 10.0
MIN_ROUNDS = 8
WIDE, WIDE_CONTEXT = 1.15, 1.5  # sizes within such a factor are about one: running requests, tokens of each


@dataclass(frozen=True, slots=True)
class Response:
    """A rollout as a run recorded it. `rounds`: that it took part in; times by its server's clock. `histogram` and
    `steps_by_strategy` as in `AcceptanceStats`."""

    group_id: str
    index: int
    server: str
    prompt_tokens: int
    tokens: int
    rounds: int
    started_s: float
    finished_s: float
    histogram: tuple[int, ...] = ()
    steps_by_strategy: Mapping[str, int] = field(default_factory=dict)

    def context_at(self, rounds: float) -> float:
        """Tokens of prompt and response after so many of its rounds."""
        return self.prompt_tokens + self.tokens * rounds / max(1, self.rounds)


@dataclass(frozen=True, slots=True)
class Rules:
    """`capacity`: requests that run at once; `late_s`: an end is seen at most so much later, `least_late_s`: taken to
    be so late where nothing tells; `dense`: keys and values are one block as wide as its longest request (as in
    `Scenario`)."""

    capacity: int
    late_s: float = 0.0
    least_late_s: float = 0.0
    dense: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Rounds in a row. `running` and `context` (tokens that a pass reads): means over them."""

    rounds: int
    seconds: float
    running: float
    context: float

    def joined(self, later: Gap) -> Gap:
        rounds = self.rounds + later.rounds
        mine, other = self.rounds / rounds, later.rounds / rounds
        return Gap(
            rounds,
            self.seconds + later.seconds,
            mine * self.running + other * later.running,
            mine * self.context + other * later.context,
        )

    @property
    def view(self) -> RoundView:
        return RoundView(max(1, round(self.running)), round(self.context))

    def point(self, strategy: DraftStrategy) -> CostPoint:
        return CostPoint(strategy, self.view, self.seconds / self.rounds)


def lockstep(responses: Sequence[Response], rules: Rules) -> bool:
    """Whether these, of one server and step, went on together from the first round to the last."""
    first_end = min(r.finished_s for r in responses)
    if len(responses) > rules.capacity or max(r.started_s for r in responses) > first_end:
        return False
    if any(r.rounds < 1 for r in responses):
        return False
    return lateness(responses) <= rules.late_s


def lateness(responses: Sequence[Response]) -> float:
    """By how much an end was seen behind one that came later: it was so late at least."""
    seen = [end_s for _, end_s in _ends(responses)]
    return max(latest - end_s for latest, end_s in zip(accumulate(seen, max), seen, strict=True))


def _ends(responses: Iterable[Response]) -> list[tuple[int, float]]:
    """(rounds, when somebody first saw one end with them), by rounds."""
    ordered = sorted(responses, key=lambda r: r.rounds)
    return [(n, min(r.finished_s for r in alike)) for n, alike in groupby(ordered, key=lambda r: r.rounds)]


def gaps(responses: Sequence[Response], rules: Rules) -> list[Gap]:
    """Of a server's rollouts in lockstep: from each end to the next."""
    found = list[Gap]()
    for (start, start_s), (end, end_s) in pairwise(_ends(responses)):
        left = [r for r in responses if r.rounds > start]
        context = _read(left, (start + end) / 2, rules.dense)
        found.append(Gap(end - start, end_s - start_s, len(left), context))
    return found


def _read(running: Sequence[Response], rounds: float, dense: bool) -> float:
    contexts = [r.context_at(rounds) for r in running]
    return len(running) * ceil(max(contexts)) if dense else sum(contexts)


def joined(found: Sequence[Gap], late_s: float) -> list[Gap]:
    """Long enough, see the top. Rounds and seconds are all there, or there is nothing."""
    whole, part = list[Gap](), None
    for gap in found:
        part = gap if part is None else part.joined(gap)
        if part.seconds > 0 and part.seconds >= SPAN * late_s and part.rounds >= MIN_ROUNDS:
            whole.append(part)
            part = None
    if part is not None and whole:
        whole[-1] = whole[-1].joined(part)
    return whole


def pooled(found: Iterable[Gap]) -> list[Gap]:
    """Those of about one size as one, of whatever step: a machine has slow moments, and a fit to relative errors, which
    believes short times more than long ones, would come out too low by the square of their spread."""
    alike: dict[tuple[int, int], Gap] = {}
    for gap in found:
        place = round(log(gap.running, WIDE)), round(log(max(1.0, gap.context / gap.running), WIDE_CONTEXT))
        alike[place] = alike[place].joined(gap) if place in alike else gap
    return list(alike.values())


@dataclass(frozen=True, slots=True)
class Beginning:
    """Until the first end: prefills of `tokens` of prompts, each group's once, and `rounds`, whose seconds are those of
    both."""

    tokens: int
    rounds: Gap

    def prefill_s(self, strategy: DraftStrategy, table: CostTable) -> float:
        """What rounds that cost as the table says leave."""
        return self.rounds.seconds - self.rounds.rounds * table.seconds(strategy, self.rounds.view).total


def beginning(responses: Sequence[Response], rules: Rules) -> Beginning:
    (first, first_s), *_ = _ends(responses)
    seconds = first_s - min(r.started_s for r in responses)
    prompts = {r.group_id: r.prompt_tokens for r in responses}
    rounds = Gap(first, seconds, len(responses), _read(responses, first / 2, rules.dense))
    return Beginning(sum(prompts.values()), rounds)


def by_server(responses: Iterable[Response]) -> Iterator[tuple[Response, ...]]:
    ordered = sorted(responses, key=lambda r: r.server)
    for _, own in groupby(ordered, key=lambda r: r.server):
        yield tuple(own)
