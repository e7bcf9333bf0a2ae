"""The engines that the GPU tests start, each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.config.load import load_config
from services.config.schema import ClusterConfig

PRESETS = Path(__file__).resolve().parents[2] / "deploy" / "presets"


@dataclass(frozen=True)
class Case:
    """`drafter_folder`: where the model's folder keeps this case's drafter; empty without one. `tp`: GPUs it takes."""

    name: str
    overrides: tuple[str, ...]
    drafter_folder: str = ""
    tp: int = 1

    @property
    def releases(self) -> bool:
        return set(RELEASING) <= set(self.overrides)

    @property
    def switches(self) -> bool:
        return set(SWITCHING) <= set(self.overrides)

    @property
    def drafts(self) -> bool:
        return self.name != "off"


def _strategy(drafter: str, depth: int, topk: int, nodes: int, sampled: bool = False) -> tuple[str, ...]:
    at = "speculation.selector.strategy"
    return (
        f"{at}.drafter={drafter}", f"{at}.depth={depth}", f"{at}.topk={topk}", f"{at}.num_draft_tokens={nodes}",
        f"{at}.sampled={str(sampled).lower()}",
    )  # fmt: skip


# The reference's tuner that explores at every round: another strategy, drawn at random, round by round.
SWITCHED = (0, 1, 3, 5)  # depths
SWITCHING = (
    "drafter.states=engine",
    "speculation.selector={type: beg_mab, epsilon: 1.0, buckets: [{strategies: [{}, "
    + ", ".join(f"{{drafter: eagle, depth: {d}, num_draft_tokens: {d + 1}}}" for d in SWITCHED[1:])
    + "]}]}",
)
EAGLE3 = ("drafter.method=eagle3",)
RELEASING = ("rollout.engine.release_memory=true",)
CASES = {
    case.name: case
    for case in (
        Case("off", _strategy("off", 0, 1, 1)),
        Case("eagle", ("drafter.states=engine", *_strategy("eagle", 3, 1, 4, sampled=True)), "drafter"),
        Case("eagle_switching", SWITCHING, "drafter"),
        Case("eagle_argmax", (*RELEASING, *_strategy("eagle", 3, 1, 4)), "drafter"),
        Case("eagle_tree", _strategy("eagle", 4, 4, 12), "drafter"),
        Case("eagle3", (*EAGLE3, *_strategy("eagle", 3, 1, 4, sampled=True)), "drafter-eagle3"),
        Case("ngram", _strategy("ngram", 4, 1, 5)),
        Case("eagle_tp2", ("drafter.states=engine", *_strategy("eagle", 3, 1, 4, sampled=True)), "drafter", tp=2),
        Case("eagle_switching_tp2", SWITCHING, "drafter", tp=2),
        Case("eagle3_tp2", (*EAGLE3, *_strategy("eagle", 3, 1, 4, sampled=True)), "drafter-eagle3", tp=2),
    )
}


def case_config(case: Case, model: Path) -> ClusterConfig:
    """The preset with this case's strategy on the model in `model` (folders target, drafter, drafter-eagle3)."""
    # Several engines start at once on one GPU: each may find less free than it saw a moment ago.
    shared = ("placement.mode=local", "rollout.engine.mem_fraction=0.6", f"rollout.engine.tp={case.tp}")
    overrides = (f"model.path={model / 'target'}", *shared, *case.overrides)
    return load_config("reasoner-sglang", overrides=overrides, presets_dir=PRESETS)
