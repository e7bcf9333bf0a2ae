"""What the selector of an SGLang engine, which decides in SGLang's own process, has learned of costs and acceptance."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.core.selector import SelectorState
from services.speculation.adaptive import KIND, Adaptive
from services.speculation.cost import CostModel
from services.speculation.expectation import AcceptanceModel
from services.speculation.gain import Costs
from services.speculation.round import RoundView, StageSeconds
from services.speculation.strategy import DraftStrategy


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Costs where the drafter has always seen everything: SGLang's catches up in rounds of OFF too."""

    costs: Costs

    def seconds(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        return self.costs.seconds(strategy, replace(view, behind_tokens=0))


@dataclass(frozen=True, slots=True)
class LearnedModels:
    costs: CaughtUp
    acceptance: AcceptanceModel


def learned_models(state: SelectorState | None) -> LearnedModels | None:
    """None of a selector without models, and of one that has not run both with drafts and without: it starts from a
    typical table that nobody measured, whose ratios would be a guess."""
    if state is None or state.learned["kind"] != KIND:
        return None
    selector = Adaptive((), CostModel(), AcceptanceModel())
    selector.restore(state.learned)
    return LearnedModels(CaughtUp(selector.costs), selector.acceptance) if selector.compared else None
