"""What a round costs: seconds per stage as a sum of terms with fitted, non-negative coefficients.

    extend   a pass of the drafter, + per token it has not seen, + per context token it reads
    draft    a network: per pass, + per drafted token, + per pass and context token; a look-up: per round and token
    verify   a pass of the target, + a rising broken line over running x nodes, + per context token, + per context token
             and node
    rest     per round, + per request, + per node

The broken line is the heart: on a GPU the pass over few nodes is bound by reading weights and nearly free of them, many
nodes are bound by arithmetic, and between lie steps of the kernels' tiles; on a CPU it bends early. A line with knots
among the measured sizes takes any such shape, a formula with a floor and a slope does not. Contexts enter linearly:
keys and values are read once per request and pass (memory-bound) or once per node (compute-bound), hence both terms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from services.core.errors import DataError
from services.speculation.least_squares import nonnegative
from services.speculation.round import RoundView, StageSeconds
from services.speculation.strategy import DraftStrategy

NETWORK = frozenset({"eagle", "hybrid"})  # drafters that run a network
LOOK_UP = frozenset({"suffix", "ngram", "hybrid"})  # drafters that look the past up
_KNOTS = 6
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostPoint:
    """A measured round. `seconds` apart by stage, or only their sum."""

    strategy: DraftStrategy
    view: RoundView
    seconds: StageSeconds | float

    @property
    def total(self) -> float:
        return self.seconds if isinstance(self.seconds, float) else self.seconds.total


@dataclass(frozen=True, slots=True)
class CostLine:
    """Seconds at no context, per context token, and of extending per token behind."""

    base: StageSeconds
    context: StageSeconds
    behind: float

    def at(self, view: RoundView) -> StageSeconds:
        base, slope, context = self.base, self.context, view.context_tokens
        return StageSeconds(
            base.extend + slope.extend * context + self.behind * view.behind_tokens,
            base.draft + slope.draft * context,
            base.verify + slope.verify * context,
            base.rest + slope.rest * context,
        )


@dataclass(frozen=True)
class CostTable:
    """`terms`: seconds by "stage/term"; `knots`: where the broken line over running x nodes may bend, from 0 up; beyond
    the last it goes on straight. `spread`: root mean square of the relative errors of the fit."""

    terms: Mapping[str, float]
    knots: tuple[float, ...]
    spread: float

    def seconds(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        return self.line(strategy, view.running).at(view)

    def line(self, strategy: DraftStrategy, running: int) -> CostLine:
        """The costs at one batch size: a line in the context and in what the drafter has to catch up with. Kept: a
        selector asks again and again, and the servers of a simulation share a table."""
        key = strategy, running
        if key not in self._lines:
            self._lines[key] = self._line(strategy, running)
        return self._lines[key]

    @cached_property
    def _lines(self) -> dict[tuple[DraftStrategy, int], CostLine]:
        return {}

    def _line(self, strategy: DraftStrategy, running: int) -> CostLine:
        nothing = self._stages(strategy, running, 0, 0)
        context = self._stages(strategy, running, 1, 0)
        behind = self._stages(strategy, running, 0, 1)
        return CostLine(
            StageSeconds(**nothing),
            StageSeconds(**{stage: value - nothing[stage] for stage, value in context.items()}),
            behind["extend"] - nothing["extend"],
        )

    def _stages(self, strategy: DraftStrategy, running: int, context: int, behind: int) -> dict[str, float]:
        stages = {"extend": 0.0, "draft": 0.0, "verify": 0.0, "rest": 0.0}
        for name, amount in quantities(strategy, running, context, behind, self.knots).items():
            stages[name.partition("/")[0]] += self.terms.get(name, 0.0) * amount
        return stages

    @classmethod
    def fit(cls, points: Sequence[CostPoint]) -> CostTable:
        """Relative errors are what is made small: a round of 1 ms counts as much as one of 100 ms.

        Raises DataError when there is nothing to fit."""
        points = [p for p in points if p.total > 0]
        if not points:
            raise DataError("no measured rounds to fit costs to: let the engine calibrate, or use CostTable.typical()")
        knots = _knots([p.view.running * p.strategy.num_draft_tokens for p in points])
        names, equations = _equations(points, knots)
        found = nonnegative([[e.get(n, 0.0) for n in names] for e, _ in equations], [wanted for _, wanted in equations])
        rough = cls(dict(zip(names, found, strict=True)), knots, 0.0)
        errors = [rough.seconds(p.strategy, p.view).total / p.total - 1 for p in points]
        return cls(rough.terms, knots, math.sqrt(sum(e * e for e in errors) / len(errors)))

    @classmethod
    def typical(cls) -> CostTable:
        """Where nothing was measured: a large model's proportions, in units of its decode step at one request (10 ms).
        Rounds of the run correct it."""
        parts = {
            "verify/pass": 0.9, "verify/nodes>0": 0.004, "verify/read": 2e-6, "rest/round": 0.08, "rest/rows": 0.001,
            "extend/pass": 0.1, "extend/tokens": 2e-4, "draft/pass": 0.1, "draft/nodes": 5e-4, "draft/look_up": 0.02,
            "draft/looked_up": 0.002,
        }  # fmt: skip
        return cls({name: 0.01 * part for name, part in parts.items()}, (0.0,), 0.5)

    def to_json(self) -> str:
        return json.dumps(self.state())

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": _FORMAT, **asdict(self), "knots": list(self.knots)}

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Raises DataError when it was not written by `to_json`."""
        try:
            return cls.of(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise DataError("not a cost table of this version: measure again with `longtail bench costs`") from error

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> CostTable:
        """Of what `state` said."""
        assert tree["format"] == _FORMAT
        return cls({str(k): float(v) for k, v in tree["terms"].items()}, tuple(tree["knots"]), tree["spread"])


def quantities(
    strategy: DraftStrategy, running: int, context: int, behind: int, knots: Sequence[float]
) -> dict[str, float]:
    """How much of each term a round needs; `context` and `behind` in tokens of all requests."""
    nodes = strategy.num_draft_tokens
    found: dict[str, float] = {
        "verify/pass": 1.0, "verify/read": context, "verify/read_by_nodes": context * nodes,
        "rest/round": 1.0, "rest/rows": running, "rest/nodes": running * nodes,
    }  # fmt: skip
    total = running * nodes
    for start, end in zip(knots, (*knots[1:], math.inf), strict=True):
        found[f"verify/nodes>{start:g}"] = min(max(total - start, 0.0), end - start)
    if strategy.drafter in NETWORK:
        drafted = running * (nodes - 1)
        found |= {"extend/pass": 1.0, "extend/tokens": behind, "extend/read": context}
        found |= {"draft/pass": strategy.depth, "draft/nodes": drafted, "draft/read": strategy.depth * context}
        found["draft/sampled"] = drafted if strategy.sampled else 0.0
    if strategy.drafter in LOOK_UP:
        found |= {"draft/look_up": 1.0, "draft/looked_up": running * strategy.depth}
    return found


def _needs(point: CostPoint, knots: Sequence[float]) -> dict[str, float]:
    view = point.view
    return quantities(point.strategy, view.running, view.context_tokens, view.behind_tokens, knots)


def _knots(sizes: Sequence[int]) -> tuple[float, ...]:
    """0 and some of the measured sizes, evenly along their ranks; not the largest: behind it nothing is known."""
    inner = sorted(set(sizes))[:-1]
    count = min(_KNOTS - 1, len(inner))
    return (0.0, *sorted({float(inner[(i + 1) * len(inner) // count - 1]) for i in range(count)}))


def _equations(
    points: Sequence[CostPoint], knots: Sequence[float]
) -> tuple[list[str], list[tuple[dict[str, float], float]]]:
    """The names of all terms, and per point one equation by stage, or one for the sum; divided by the measured total.
    A sum cannot tell `rest` from `verify`, whose terms go along: it is all laid on the latter."""
    equations: list[tuple[dict[str, float], float]] = []
    for point in points:
        needed, total = _needs(point, knots), point.total
        scaled = {name: amount / total for name, amount in needed.items()}
        if isinstance(point.seconds, float):
            equations.append(({name: amount for name, amount in scaled.items() if not name.startswith("rest/")}, 1.0))
            continue
        for stage, seconds in asdict(point.seconds).items():
            own = {name: amount for name, amount in scaled.items() if name.startswith(f"{stage}/")}
            if own:
                equations.append((own, seconds / total))
    return sorted({name for equation, _ in equations for name in equation}), equations
