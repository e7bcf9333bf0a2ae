"""The values that each label can take in a run, known from its configuration: no series appears or goes later."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from services.config.naming import strategy_name
from services.config.schema import ClusterConfig
from services.config.speculation import AdaptiveSelector, BucketSelector, EmaSelector, SpeculationConfig
from services.core.types import FinishReason, SlotState

OFF = "off"
OTHER = "other"  # whatever the configuration or this list does not know
# As numbers for `longtail_slot_state`: the order must not change, dashboards map it back.
STATES = (
    SlotState.IDLE, SlotState.ROLLOUT, SlotState.DRAINING, SlotState.DRAFTING, SlotState.POLICY, SlotState.LOST,
)  # fmt: skip
HOLDERS = ("policy", "reward")  # of spans, without a slot of their own
PHASES = ("starting", "evaluation", "rollout", "reward", "policy", "publish", "load", "comparison", "paused",
    "finished", OTHER)  # fmt: skip
PARTS = ("rollout", "reward", "policy", "publish")
CAUSES = ("refused", "evicted", "aged_out", "damaged", "unwritten")
EVENTS = (
    "slot_lost", "slot_returned", "server_gone", "server_restarted", "version_mismatch", "drafter_lost",
    "drafter_returned", "drafter_gone", "drafter_parts_lost", "drafter_published", "drafter_kept", "drafter_useless",
    "drafter_rests", "drafter_trains", "states_dropped", "tail_moved", "rollouts_missing", "policy_lost", "reward_lost",
    "coordinator_returned", "run_resumed", "prompts_changed", "transfer_failed", "energy_missing", "energy_reset",
    "weights_lost", "drafter_salvaged", "paused", "resumed", "strategy_forced", "checkpoint", "selector_restored",
    OTHER,
)  # fmt: skip

OCTAVES = (1, 2, 3, 5, 9, 17, 33, 65)

Series = tuple[str, ...]


def bucket_starts(speculation: SpeculationConfig) -> tuple[int, ...]:
    """Where the ranges of running requests begin that the selector tells apart. The adaptive one knows no ranges: it
    gets octaves, to show what it did at which batch size."""
    match speculation.selector:
        case BucketSelector(buckets=parts) | EmaSelector(slots=parts):
            return tuple(part.min_running for part in parts)
        case AdaptiveSelector():
            return OCTAVES
    return (1,)


def bucket_names(starts: tuple[int, ...]) -> tuple[str, ...]:
    """ "1-16", "17+": requests that run at a server."""
    ends = [str(start - 1) for start in starts[1:]]
    return (*(f"{a}-{b}" for a, b in zip(starts, ends, strict=False)), f"{starts[-1]}+")


def slot_name(slot: int) -> str:
    return f"slot {slot}"


class LabelValues:
    """`series(labels)`: every combination of label values that a metric with these labels has."""

    def __init__(self, config: ClusterConfig) -> None:
        slots = tuple(slot_name(i) for i in range(config.rollout.num_servers))
        names = (OFF, *(strategy_name(s) for s in config.speculation.strategies))
        self.bucket_starts = bucket_starts(config.speculation)
        self._values: dict[str, Series] = {
            "name": (config.run.name,),
            "phase": PHASES,
            "part": PARTS,
            "kind": EVENTS,
            "slot": slots,
            "role": tuple(state.value for state in SlotState),
            "use": ("unused", "drafting"),
            "holder": ("rollout", "policy"),
            "switch": ("release", "resume"),
            "state": ("running", "queued"),
            "reason": (FinishReason.STOP.value, FinishReason.LENGTH.value),
            "stat": ("p50", "p99", "max"),
            "strategy": (*dict.fromkeys(names), OTHER),
            "bucket": bucket_names(self.bucket_starts),
            "drafter": ("live", "frozen"),
            "weights": ("policy", "drafter"),
            "place": ("memory", "disk"),
            "cause": CAUSES,
            "fate": ("trained", "dropped"),
        }
        self._extra: Mapping[tuple[str, ...], tuple[Series, ...]] = {
            ("slot", "role"): tuple((holder, holder) for holder in HOLDERS)
        }

    def known(self, label: str, value: str) -> str:
        """The value, or OTHER."""
        return value if value in self._values[label] else OTHER

    def series(self, labels: tuple[str, ...]) -> tuple[Series, ...]:
        return (*product(*(self._values[label] for label in labels)), *self._extra.get(labels, ()))
