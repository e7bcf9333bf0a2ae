"""The same run in several modes of speculation, to tell what each part brings.

off       no speculation; everything else as in the run
static    one strategy whatever the batch, the drafter frozen
suffix    drafts from what was generated before, no network (the native engine's)
ema       SGLang's own rule over chain depths, the drafter frozen
tlt       the reference's rules (TLT, arXiv 2511.16665): its bandit where at most 32 requests run, OFF above, the
          drafter trained in the idle time of every tenth step's rollout phase
full      the run as it is: the adaptive selector, training as long as it pays
"""

from __future__ import annotations

from typing import Any

from services.config.schema import ClusterConfig
from services.config.schema import NativeEngine as NativeEngineConfig
from services.config.speculation import AdaptiveSelector, SpeculationConfig, StrategyConfig, eagle_chain

THRESHOLD = 32  # running requests up to which the reference speculates
INTERVAL = 10  # steps from one training of the reference's drafter to the next
OFF = {"drafter": "off"}
NEVER = {"when": "never", "every": 1}  # of drafter.training
_TRAINING = {
    "static": NEVER,
    "ema": NEVER,
    "tlt": {"when": "always", "every": INTERVAL, "beside_policy": False},
}


def modes_of(config: ClusterConfig) -> tuple[str, ...]:
    """Those that the engine can run."""
    native = isinstance(config.rollout.engine, NativeEngineConfig)
    return ("off", "static", "suffix", "tlt", "full") if native else ("off", "static", "ema", "tlt", "full")


def in_mode(config: ClusterConfig, mode: str, best: StrategyConfig | None = None) -> ClusterConfig:
    """`best`: the strategy of mode static; None: a chain of 3. Validated like any configuration."""
    tree = config.model_dump()
    tree["speculation"]["selector"] = _selector(config, mode, best or eagle_chain(3))
    tree["drafter"]["training"] |= _TRAINING.get(mode, {})
    if not SpeculationConfig.model_validate(tree["speculation"]).learned:
        tree["drafter"]["states"] = "policy"  # which keeps none where no drafter learns
    return ClusterConfig.model_validate(tree)


def drafting_strategies(config: ClusterConfig) -> tuple[StrategyConfig, ...]:
    """Candidates for the best fixed one: what the run's selector may choose, OFF apart."""
    return tuple(s for s in config.speculation.strategies if s.drafter != "off") or (eagle_chain(3),)


def _selector(config: ClusterConfig, mode: str, best: StrategyConfig) -> dict[str, Any]:
    candidates = drafting_strategies(config)
    match mode:
        case "off":
            return {"type": "fixed", "strategy": OFF}
        case "static":
            return {"type": "fixed", "strategy": best.model_dump()}
        case "suffix":
            return {"type": "fixed", "strategy": {"drafter": "suffix", "depth": 4, "num_draft_tokens": 5}}
        case "ema":
            return {"type": "ema"}
        case "tlt":
            learned = [s.model_dump() for s in candidates if s.learned]
            above = {"min_running": THRESHOLD + 1, "strategies": [OFF]}
            return {"type": "beg_mab", "buckets": [{"min_running": 1, "strategies": learned}, above]}
        case "full":
            chosen = config.speculation.selector
            if isinstance(chosen, AdaptiveSelector):
                return chosen.model_dump()
            return {"type": "adaptive", "strategies": [s.model_dump() for s in candidates]}
    raise AssertionError(f"no mode {mode!r}")
